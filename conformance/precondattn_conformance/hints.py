"""Hints at an arrangement that allows more comparisons, if every call of a kind raised an error.

    widths: no call with values of another width than keys ran (17 declined); with widths="equal",
    zeros are appended to the values

An arrangement is never chosen automatically, since the error may be a fault of the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from precondattn_conformance.case import Case
from precondattn_conformance.functions.arrangement import Arrangement
from precondattn_conformance.report.refusal import in_few_words
from precondattn_conformance.runner import Outcome
from precondattn_conformance.status import COMPARED, UNSUPPORTED

BLOCK = 64
"""The most common multiple of tokens that kernels require."""


class _Kind(NamedTuple):
    is_of: Callable[[Case], bool]
    calls: str
    option: str
    does: str


KINDS = {
    "widths": _Kind(
        lambda case: case.layout.e < case.layout.d,
        "values narrower than keys",
        'widths="equal"',
        "zeros are appended to the values",
    ),
    "heads": _Kind(
        lambda case: case.layout.n < case.layout.h or case.layout.values_per_head > 1,
        "grouped heads",
        'heads="equal"',
        "key and value heads are repeated",
    ),
    "multiple": _Kind(
        lambda case: case.layout.t % BLOCK != 0,
        f"a number of tokens that is no multiple of {BLOCK}",
        f"multiple={BLOCK}",
        "zeros are appended to the tokens",
    ),
}


def hints(outcomes: Sequence[Outcome], arrangement: Arrangement) -> Iterator[str]:
    """A hint for each arrangement option with its default that the function may need."""
    declined = [o for o in outcomes if o.status == UNSUPPORTED]
    raised = [o.case for o in declined if in_few_words(o.reason).startswith("raised")]
    compared = [o.case for o in outcomes if o.status in COMPARED]
    for name, kind in KINDS.items():
        if getattr(arrangement, name) != getattr(Arrangement(), name):
            continue
        count = sum(map(kind.is_of, raised))
        if count and not any(map(kind.is_of, compared)):
            yield (
                f"{name}: no call with {kind.calls} ran ({count} declined); with "
                f"{kind.option}, {kind.does}"
            )
