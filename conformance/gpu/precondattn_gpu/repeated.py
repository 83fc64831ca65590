"""Whether calls that repeat the launches of an earlier one have its results, bit for bit.

The first call of a signature runs all of the host's code, the second is recorded, and the third
only launches (`precondattn_triton.replay`). The oracle is compared with calls whose launches are
watched, and which are therefore not repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import precondattn as pa

if TYPE_CHECKING:
    from precondattn_conformance.inputs import CallLayout
    from precondattn_conformance.libraries import Library

Arrays = dict[str, Any]
"""Arrays by name, of any library."""

CALLS = 3


def difference(
    mechanism: str, layout: CallLayout, dtype: str, library: Library, backends: tuple[str, ...]
) -> str:
    """The names of the results in which the third call differs from the first; or nothing."""
    from precondattn_conformance.bench.correct import inputs_of

    given = inputs_of(mechanism, layout, dtype, library.name)
    x = {name: library.array(array, dtype) for name, array in given.items()}
    first = _results(mechanism, x, backends)
    for _ in range(CALLS - 1):
        last = _results(mechanism, x, backends)
    different = [
        name
        for name in first
        if not np.array_equal(library.numpy(first[name]), library.numpy(last[name]), equal_nan=True)
    ]
    return ", ".join(different)


def _results(mechanism: str, x: Arrays, backends: tuple[str, ...]) -> Arrays:
    """The output and the gradients of a call whose cotangent is its output."""
    out, pullback = pa.parse(mechanism).vjp(**x, backend=backends)
    gradients = pullback(out)
    return {"output": out} | {f"gradient of {name}": g for name, g in gradients.items()}
