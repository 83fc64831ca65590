"""Layout names that contain all properties of a layout, so that an id alone replays a case.

b2t33s33h4n2d24e40block16.lengths_apart+key_blocks.heads_first

Sizes, the size of a block, masks, and the order in memory; then, if an additive bias is broadcast,
`over_b`, `over_h` or `over_bh`. After e, sizes that have their default are left out.
"""

from __future__ import annotations

import re

from precondattn_conformance.inputs import CallLayout
from precondattn_conformance.masks import PATTERNS
from precondattn_conformance.memory_order import ORDERS

_NAME = re.compile(
    r"b(?P<b>\d+)t(?P<t>\d+)s(?P<s>\d+)h(?P<h>\d+)n(?P<n>\d+)d(?P<d>\d+)e(?P<e>\d+)"
    r"(?:u(?P<u>\d+))?(?:block(?P<block>\d+))?(?P<rest>(?:\.[a-z_+]+)*)"
)
VALUES_PER_HEAD = 1
"""The default number of value heads per query head in these layouts."""


def named(layout: CallLayout) -> CallLayout:
    """The layout with its name."""
    b, t, s, h, n, d, e = (getattr(layout, letter) for letter in "btshnde")
    name = f"b{b}t{t}s{s}h{h}n{n}d{d}e{e}"
    if layout.values_per_head != VALUES_PER_HEAD:
        name += f"u{layout.values_per_head}"
    if layout.block:
        name += f"block{layout.block}"
    over = layout.broadcast and f"over_{layout.broadcast}"
    words = [word for word in (layout.mask, layout.order, over) if word]
    return layout._replace(name=".".join([name, *words]))


def layout_named(name: str) -> CallLayout | None:
    """The layout with such a name; None if the name has another form."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layout = CallLayout(
        name,
        b=int(match["b"]),
        t=int(match["t"]),
        s=int(match["s"]),
        h=int(match["h"]),
        n=int(match["n"]),
        d=int(match["d"]),
        e=int(match["e"]),
        values_per_head=int(match["u"] or VALUES_PER_HEAD),
        block=int(match["block"] or 0),
    )
    for word in match["rest"].split(".")[1:]:
        if word in ORDERS:
            layout = layout._replace(order=word)
        elif word.removeprefix("over_") in ("b", "h", "bh"):
            layout = layout._replace(broadcast=word.removeprefix("over_"))
        elif all(part in PATTERNS for part in word.split("+")):
            layout = layout._replace(mask=word)
        else:
            return None
    return layout if named(layout).name == name else None
