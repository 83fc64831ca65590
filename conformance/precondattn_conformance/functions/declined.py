"""Parts of the suite that a function's parameters rule out, in the form of `Backend.declines`.

They follow from the function's signature or from the arguments of `check`. Limits that are found
only by calling the function, such as an error with grouped heads, are not included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import precondattn as pa
from precondattn.arrays import DIFFERENTIATING
from precondattn_conformance.functions.parameters import Parameters
from precondattn_conformance.libraries import HALF, WIDE

MASKS = ("lengths", "key_mask", "segment_ids")
COMPILED = ("transforms", "dynamic_shapes", "sharding")
"""The checks that compile or map a function."""


def declined(
    mechanism: pa.Mechanism,
    parameters: Parameters,
    masks: Iterable[str],
    libraries: Iterable[str],
    dtypes: frozenset[str] | None,
    *,
    gradient: bool,
) -> Iterator[str]:
    """Texts "part: reason" for a function that takes these masks."""
    for library in libraries:
        if not (gradient and library in DIFFERENTIATING):
            yield f"vjp {library}: has no gradient"
    if parameters.state is None or len(mechanism.program.slots) != 1:
        yield "extend: has no parameter for its state"
    for mask in MASKS:
        if mask not in masks:
            yield f"{mask}: has no parameter for it"
    for dtype in (*WIDE, *HALF):
        if dtypes is not None and dtype not in dtypes:
            yield f"{dtype}: is no dtype of the function"
    for check in COMPILED:
        yield f"{check}: is called as it is, and not compiled"
