"""Random layouts: drawn by Hypothesis, the same in every run. Their names contain their sizes.

b2t13s13h4n2d8e3lengths   →   Layout(b=2, t=13, s=13, h=4, n=2, d=8, e=3, mask="lengths")
"""

from __future__ import annotations

import re
from functools import cache

from precondattn_conformance.inputs import Layout

MASKS = ("none", "lengths", "key_mask", "segment_ids")
NAME = re.compile(r"b(\d+)t(\d+)s(\d+)h(\d+)n(\d+)d(\d+)e(\d+)(\w+)")


def layout_named(name: str) -> Layout | None:
    """The layout of such a name; None if the name has another form."""
    match = NAME.fullmatch(name)
    if match is None or match[8] not in MASKS:
        return None
    b, t, s, h, n, d, e = map(int, match.groups()[:7])
    mask = None if match[8] == "none" else match[8]
    return Layout(name, b=b, t=t, s=s, h=h, n=n, d=d, e=e, values_per_head=1, mask=mask)


@cache
def random_layouts(count: int) -> tuple[Layout, ...]:
    """`count` different layouts: sizes around powers of two, any grouping of heads, any mask."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    near_blocks = st.sampled_from([15, 16, 17, 31, 33, 64, 95, 127, 129])
    tokens = st.one_of(st.integers(1, 40), near_blocks)
    layouts: dict[str, Layout] = {}

    @settings(
        max_examples=20 * count,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(
        b=st.integers(1, 3),
        t=tokens,
        n=st.integers(1, 3),
        group=st.integers(1, 4),
        d=st.integers(1, 40),
        e=st.integers(1, 40),
        mask=st.sampled_from(MASKS),
    )
    def draw(b: int, t: int, n: int, group: int, d: int, e: int, mask: str) -> None:
        name = f"b{b}t{t}s{t}h{n * group}n{n}d{2 * d}e{e}{mask}"
        layout = layout_named(name)
        if layout is not None and len(layouts) < count:
            layouts[name] = layout

    draw()
    return tuple(layouts.values())
