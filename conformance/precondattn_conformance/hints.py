"""Which arrangement would compare more, where every call of a kind ended with an error.

    widths: no call with values of another width than keys ran (17 declined); with widths="equal",
    zeros are appended to the values

An arrangement is never chosen for a caller: such an error may be one that should not be.
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
"""The tokens that kernels most often take multiples of."""


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
    """A sentence for each arrangement that has its default and may be what the function needs."""
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
