"""Values and cotangents between the pieces of a call in half precision.

They keep the dtype in which a piece computed them, which is float32 for a backend with
`wide_values`. All other backends get them in the call's dtype, as kernels for half precision need.

In float16 that may overflow: at a row of zeros, row-normalised attention has the cotangent dy / ε.
A gradient is linear in the cotangent,

    backward(dy) = c backward(dy / c),

so there the cotangent is divided by such a number c that its largest entry is `LARGEST`, and the
gradients are multiplied by c in float32. Values are not scaled: beyond 65504 they are infinite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precondattn.arrays import Array, Arrays, Residuals, cast, dtype_name, namespace, upcast
from precondattn.backend import Backend
from precondattn.frame import Frame

LARGEST = 8192.0
"""Sums of seven such cotangents are finite in float16, and 1e-11 of it is above 0."""


def gradients_at(
    cotangent: Array,
    backend: Backend,
    piece: Any,
    inputs: Mapping[str, Array],
    frame: Frame,
    out: Array,
    residuals: Residuals,
) -> Arrays:
    """The backend's gradients at a cotangent that may be wider than its output."""
    if dtype_name(out) != "float16" or cotangent.dtype == out.dtype or 0 in cotangent.shape:
        narrow = cast(cotangent, out.dtype)
        return backend.backward(piece, inputs, frame, out, residuals, narrow)
    xp = namespace(cotangent)
    sizes = xp.where(xp.isfinite(cotangent), xp.abs(cotangent), 0.0)
    factor = xp.clip(xp.max(sizes) / LARGEST, min=1.0)
    narrow = cast(cotangent / factor, out.dtype)
    gradients = backend.backward(piece, inputs, frame, out, residuals, narrow)
    return {name: upcast(gradient) * factor for name, gradient in gradients.items()}
