"""Tests whether a backend computes a mechanism in at most float32.

At `smoke` most checks run in float64, where the bounds are tightest. A backend without float64 gets
the same cases in float32.
"""

from __future__ import annotations

from functools import cache, partial
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
    # A name may later be another backend's, after which `changes` differs.
    run_in = partial(_runs, backend, expression, library, device, discovery.changes)
    return not run_in("float64") and run_in("float32")


@cache
def _runs(
    backend: tuple[str, ...],
    expression: str,
    library: str,
    device: str | None,
    changes: int,
    dtype: str,
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
