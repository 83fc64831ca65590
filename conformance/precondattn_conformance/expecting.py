"""The source of expected results: the reference or, for a long call, the blocked algorithms.

The reference needs a matrix of all queries and keys, or runs token by token. A call with more than
1,000 keys is computed by `portable`, in float64 on NumPy, if `portable` agrees with the reference
on the same call with 197 keys. That call has the same mechanism, masks, widths, heads and kind of
keys, and the output and every gradient must agree to 1e-10. Otherwise, the reference computes it.

The reference is also used for backends with the algorithms of `portable`, whose faults would be on
both sides.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from precondattn.dispatch.discovery import discover
from precondattn_conformance.case import Case
from precondattn_conformance.declared import mechanism_of
from precondattn_conformance.inputs import KINDS, CallLayout, make_inputs
from precondattn_conformance.layout_names import named
from precondattn_conformance.tolerance import BOUND, error

REFERENCE, BLOCKED = "reference", "portable"
HELPED = {REFERENCE: (REFERENCE,), BLOCKED: (BLOCKED, REFERENCE)}
"""The backends for each source: the reference computes what the blocked algorithms lack."""
RELATED = (BLOCKED, "torch", "jax")
"""The backends that use the algorithms of `portable`."""
CHECKS = ("outputs", "gradients", "caching")
"""The checks that compare with a full call, at the lengths of the design."""
LONG = 1000
SHORT = 197
"""The number of keys of the short call: three blocks of 64, and 5 tokens."""


def expected_by(case: Case, backend: str | tuple[str, ...] | None) -> str:
    """`"reference"`, or `"portable"` for a long case of a backend with other algorithms."""
    under_test = backend[0] if isinstance(backend, tuple) else backend
    if case.layout.s < LONG or case.check not in CHECKS or case.kind not in KINDS:
        return REFERENCE
    is_installed = any(each.name == BLOCKED for each in discover().backends)
    if under_test is None or under_test in RELATED or not is_installed:
        return REFERENCE
    return BLOCKED if is_certified(case.mechanism, shortened(case.layout), case.kind) else REFERENCE


def shortened(layout: CallLayout) -> CallLayout:
    """The layout with fewer keys and as many fewer queries; a single query stays one."""
    queries = SHORT - (layout.s - layout.t)
    t = 1 if layout.t == 1 else max(queries, 1)
    return named(layout._replace(t=t, s=SHORT))


@lru_cache(maxsize=256)
def is_certified(mechanism: str, layout: CallLayout, kind: str) -> bool:
    """Whether the blocked algorithms agree with the reference on the short call, in float64."""
    m = mechanism_of(mechanism)
    inputs, masks = make_inputs(m, layout, kind), layout.masks()
    out, pullback = m.vjp(**inputs, **masks, backend=REFERENCE)
    cotangent = np.random.default_rng(1).normal(size=out.shape)
    cotangent = np.where(np.isfinite(out), cotangent, 0.0)
    found, blocked_pullback = m.vjp(**inputs, **masks, backend=HELPED[BLOCKED])
    gradients, blocked = pullback(cotangent), blocked_pullback(cotangent)
    errors = [error(found, out), *(error(blocked[name], g) for name, g in gradients.items())]
    return bool(max(errors) <= BOUND["float64"])
