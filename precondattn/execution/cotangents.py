"""The dtypes of values and cotangents between the pieces of a call in half precision.

A backend with `wide_values` gets them in float32, if a piece computed them so. In float16 a
cotangent may overflow: at a row of zeros, row-normalised attention has the cotangent dy / ε. A
gradient is linear in the cotangent,

    backward(dy) = c backward(dy / c),

so in float16 the cotangent is divided by the number c that makes its largest entry `LARGEST`, and
the gradients are multiplied by c in float32. Values are not scaled: beyond 65504 they are infinite.
"""

from __future__ import annotations

from precondattn.arrays import Array, Arrays, Residuals, cast, dtype_name, namespace, upcast
from precondattn.backend import Runner
from precondattn.frame import Frame

LARGEST = 8192.0
"""The largest scaled cotangent. Seven times it is finite in float16, and 1e-11 of it is not 0."""


def gradients_at(
    dy: Array, runner: Runner, inputs: Arrays, frame: Frame, out: Array, residuals: Residuals
) -> Arrays:
    """The gradients of a piece at a cotangent that may be wider than its output."""
    c = _divisor(dy, out)
    narrow = cast(_divided(dy, c), out.dtype)
    return _multiplied(runner.backward(inputs, frame, out, residuals, narrow), c)


def step_gradients_at(
    dy: Array, d_new: Arrays, runner: Runner, past: Arrays, inputs: Arrays, frame: Frame, out: Array
) -> tuple[Arrays, Arrays]:
    """The gradients of a step, linear in both cotangents; only the dtype of `out` is used."""
    c = _divisor(dy, out)
    narrow = cast(_divided(dy, c), out.dtype)
    d_narrow = {name: _divided(d_buffer, c) for name, d_buffer in d_new.items()}
    gradients, d_past = runner.step_backward(past, inputs, frame, narrow, d_narrow)
    return _multiplied(gradients, c), _multiplied(d_past, c)


def _divisor(dy: Array, out: Array) -> Array | None:
    """The divisor c; None if the cotangent is not divided."""
    if dtype_name(out) != "float16" or dy.dtype == out.dtype or 0 in dy.shape:
        return None
    xp = namespace(dy)
    sizes = xp.where(xp.isfinite(dy), xp.abs(dy), 0.0)
    return xp.clip(xp.max(sizes) / LARGEST, min=1.0)


def _divided(cotangent: Array, c: Array | None) -> Array:
    return cotangent if c is None else upcast(cotangent) / c


def _multiplied(gradients: Arrays, c: Array | None) -> Arrays:
    return gradients if c is None else {name: upcast(d) * c for name, d in gradients.items()}
