"""Tests whether a backend computes a mechanism in at most float32.

At `smoke` most checks run in float64, where the bounds are tightest. A backend without float64 gets
the same cases in float32.
"""

from __future__ import annotations

from functools import cache
from itertools import product

from precondattn.dispatch import discovery
from precondattn.dispatch.described import DEVICES, explain_described
from precondattn_conformance.declared import mechanism_of
from precondattn_conformance.inputs import PLAIN

CALLS = (PLAIN, PLAIN._replace(h=2, n=2, d=8, e=8, values_per_head=1))
"""Sizes of test calls: with grouped heads and odd widths, and without."""


def is_narrow(
    backend: tuple[str, ...], expression: str, library: str, device: str | None = None
) -> bool:
    """Whether the first of these backends runs a part of the mechanism in float32 only.

    The backend is asked about small calls on the given kind of device, or on all kinds that the
    library has.
    """
    changes = discovery.changes  # A name may later be another backend's.
    return _is_narrow(backend, expression, library, device, changes)


@cache
def _is_narrow(
    backend: tuple[str, ...], expression: str, library: str, device: str | None, changes: int
) -> bool:
    return not runs(backend, expression, library, "float64", device) and runs(
        backend, expression, library, "float32", device
    )


def runs(
    backend: tuple[str, ...], expression: str, library: str, dtype: str, device: str | None = None
) -> bool:
    """Whether the first of these backends runs a part of the mechanism in this dtype."""
    mechanism, kinds = mechanism_of(expression), (device,) if device else DEVICES[library]
    for kind, call in product(kinds, CALLS):
        try:
            explained = explain_described(
                mechanism, library, dtype, kind, "forward", call.sizes, backend=backend
            )
        except Exception:  # It declines, or raises an error that the case will show.
            continue
        if backend[0] in explained.backends:
            return True
    return False
