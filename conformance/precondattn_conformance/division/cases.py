"""The cases of divided calls: mechanisms × layouts × sizes, masks, kinds of keys and dtypes.

smoke    every mechanism that a class declares in each layout, once plainly and once with another
         entry of the table, in turn; other compositions plainly in one layout, in turn
full     every mechanism in each layout, with all entries of the table
stress   full, and sequences of several blocks of LUCID's solve

Sizes depend on the number of devices: each has few tokens, and heads can be divided. In PyTorch
devices have different numbers of tokens, in JAX equal ones. A zigzag has an even number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, product

import precondattn as pa
from precondattn_conformance.case import Case
from precondattn_conformance.cases import case_of as any_case_of
from precondattn_conformance.cases import has_result, require_possible
from precondattn_conformance.declared import derived, expressions
from precondattn_conformance.division.parts import ORDERS
from precondattn_conformance.division.processes import WORKERS
from precondattn_conformance.inputs import CallLayout
from precondattn_conformance.layout_names import named
from precondattn_conformance.libraries import HALF, WIDE, installed

BY_DEFAULT = ("torch",)
"""The default libraries. JAX is not one of them, because it compiles each case for seconds."""
LEAST, MOST = 2, 64
"""The smallest and the largest number of devices."""
BLOCK = 2
"""The block size of the layout `cyclic` and of masks."""

Entry = tuple[str, str, str]
"""An entry of the tables below: sizes and masks, the dtype, the kind of keys."""

PLAIN: Entry = ("uneven", "float64", "clustered")
ENTRIES: tuple[Entry, ...] = (
    ("uneven.lengths+segment_ids", "float64", "clustered"),
    ("one_key_head.key_mask", "float64", "duplicate"),
    ("uneven", "float32", "clustered"),
    ("one_sequence.segments_long", "float64", "zero"),
    ("uneven", "bfloat16", "clustered"),
    ("one_token_each", "float64", "random"),
    ("uneven.lengths", "float64", "clustered"),
    ("fewer_queries", "float64", "clustered"),
    ("uneven.segment_ids", "float32", "random"),
    ("one_key_head", "float16", "random"),
    ("uneven.lengths", "bfloat16", "random"),
)
LONG: tuple[Entry, ...] = (
    ("long", "float64", "clustered"),
    ("long.lengths", "float32", "random"),
)
LONG_BLOCK = 96
LONG_TOKENS = 601
"""The number of tokens of each device; it exceeds a block of LUCID's solve."""


def sizes_of(words: str, order: str, devices: int, library: str = "torch") -> CallLayout:
    """The sizes and masks of an entry, for a number of devices."""
    kind, _, mask = words.partition(".")
    pair = 2 if order == "zigzag" else 1
    is_even = library != "torch"
    s = (6 if order == "zigzag" else 5) * devices - pair
    if is_even:
        s = (5 if order in ("heads", "contiguous") else 6) * devices
    each = LONG_TOKENS // LONG_BLOCK * LONG_BLOCK if is_even else LONG_TOKENS
    long = each * devices // pair * pair
    changes: dict[str, dict[str, int]] = {
        "one_key_head": {"n": 1},
        "one_token_each": {"t": pair * devices, "s": pair * devices, "block": 1},
        "one_sequence": {"b": 1},
        "fewer_queries": {"t": 2 * devices},
        "long": {"b": 1, "t": long, "s": long, "h": devices, "block": LONG_BLOCK},
    }
    values = 1 if kind == "long" else 2
    layout = CallLayout("", t=s, s=s, h=2 * devices, n=devices, block=BLOCK, mask=mask or None)
    layout = layout._replace(values_per_head=values)
    return named(layout._replace(**changes.get(kind, {})))  # type: ignore[arg-type]  # Sizes.


def divided_cases(
    devices: int,
    level: str = "smoke",
    *,
    only_libraries: tuple[str, ...] = (),
    only_mechanisms: tuple[str, ...] = (),
    only_checks: tuple[str, ...] = (),
    only_dtypes: tuple[str, ...] = (),
) -> Iterator[Case]:
    """The cases of a level; cases of one mechanism are consecutive.

    Raises
    ------
    ValueError
        for another level, library, layout or dtype, and for fewer than two devices.
    """
    if not LEAST <= devices <= MOST:
        raise ValueError(f"--devices must be {LEAST} ... {MOST}; found {devices}")
    layouts = (only_checks, ORDERS, "layout of divided sequences")
    require_possible(level, layouts, (only_dtypes, WIDE + HALF, "dtype"))
    libraries = only_libraries or BY_DEFAULT
    for library in libraries:
        require_divided(library)
    mechanisms = [str(pa.parse(text)) for text in only_mechanisms] or expressions()
    is_only = bool(only_mechanisms)
    turns = {library: count() for library in libraries}
    for library, mechanism in product(libraries, mechanisms):
        turn = turns[library]
        for number, order in enumerate(ORDERS):
            for words, dtype, kind in _entries(level, mechanism, number, turn, is_only=is_only):
                sizes = sizes_of(words, order, devices, library)
                if sizes.t < sizes.s and order != "heads":
                    continue  # The other layouts apply to inputs with one token axis.
                if only_dtypes and dtype not in only_dtypes:
                    continue
                if only_checks and order not in only_checks:
                    continue
                if has_result(mechanism, sizes, kind):
                    yield Case(order, mechanism, library, dtype, sizes, kind)


def _entries(
    level: str, mechanism: str, number: int, turn: count[int], *, is_only: bool
) -> tuple[Entry, ...]:
    """The entries of a mechanism in the layout with this number. `is_only`: the run names the
    mechanism."""
    if level == "full":
        return (PLAIN, *ENTRIES)
    if level == "stress":
        return (PLAIN, *ENTRIES, *LONG)
    if mechanism in derived() and not is_only:
        return (PLAIN,) if number == len(mechanism) % len(ORDERS) else ()
    return PLAIN, ENTRIES[next(turn) % len(ENTRIES)]


def require_divided(library: str) -> None:
    """Raise a ValueError for a library in which sequences can not be divided."""
    if library not in WORKERS:
        raise ValueError(
            f"--devices compares sequences that devices of {' or '.join(WORKERS)} divide; "
            f"found the library {library!r}"
        )
    if library not in installed():
        raise ValueError(f"--devices needs {library}, which is not installed")


def case_of(text: str) -> Case:
    """The case with an id whose check is a layout.

    Raises
    ------
    ValueError
        if the text is not such an id.
    """
    case = any_case_of(text, ORDERS)
    require_divided(case.library)
    return case
