"""Whether a backend computes a mechanism in float32 at most.

At `smoke` most checks run in float64, where the bounds are tightest. A backend that has no float64
gets the same cases in float32.
"""

from __future__ import annotations

from functools import cache

from precondattn.dispatch.described import DEVICES, explain_described
from precondattn_conformance.declared import mechanism_of
from precondattn_conformance.grid import PLAIN


@cache
def is_narrow(
    backend: tuple[str, ...], expression: str, library: str, device: str | None = None
) -> bool:
    """Whether the first of these backends runs a part of the mechanism in float32 only.

    It is asked about a small call, on the kind of the device, or on all that the library has.
    """
    return not runs(backend, expression, library, "float64", device) and runs(
        backend, expression, library, "float32", device
    )


def runs(
    backend: tuple[str, ...], expression: str, library: str, dtype: str, device: str | None = None
) -> bool:
    """Whether the first of these backends runs a part of the mechanism in this dtype."""
    kinds = (device,) if device else DEVICES[library]
    return any(_runs(backend, expression, library, dtype, kind) for kind in kinds)


def _runs(backend: tuple[str, ...], expression: str, library: str, dtype: str, device: str) -> bool:
    mechanism, sizes = mechanism_of(expression), PLAIN.sizes
    try:
        explained = explain_described(
            mechanism, library, dtype, device, "forward", sizes, backend=backend
        )
    except Exception:  # It declines, or its answer is an error that the case itself will show.
        return False
    return backend[0] in explained.backends
