"""LASER as a leaf of the backend: flash attention for close heads, exact kernels for the others.

A head is close if the values of each channel are near enough to one another that no e^{v − ν}
underflows, with ν their maximum. Then LASER is attention to W = e^{v − ν} − u.

Residuals: λ (b, h, t), in units of log 2; the range of the values; and (b, t, h, e) in float32, A W
for close heads, the output for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from precondattn.arrays import Array, Arrays, DType, Residuals, cast
from precondattn.backend import ArraySpec, Request
from precondattn.frame import Frame
from precondattn.spec.laser import RANGE
from precondattn.spec.softmax import Softmax
from precondattn_cupy.launch import Argument, cpp_type, is_simulated, launch
from precondattn_cupy.layout import empty, in_one_piece, masks_of
from precondattn_cupy.softmax import laser_exact
from precondattn_cupy.softmax.attention import (
    SoftmaxCall,
    Values,
    attend,
    call_of,
    key_gradient,
    query_gradient,
)
from precondattn_cupy.softmax.leaf import SoftmaxKernels, inputs_of

SEGMENT = 256
"""Tokens whose values a block compares."""
WARPS = 8
"""Warps of a block; each has a row."""
WIDEST_OF_TWO = 128
"""The widest rows in float16, where each exponential of a value is stored as two numbers."""


class ValueSpread(NamedTuple):
    """The range of the values of each key/value head."""

    shift: Array
    """ν (b, n, e), float32: the largest value of a channel"""
    less: Array
    """u (b, n, e), float32: 1 where the values of a channel are within log 2, else 0"""
    is_close: Array
    """(b, n), int32"""


class LaserKernels(SoftmaxKernels):
    """Algorithm of `Softmax` whose output is a log-mean-exp of the values."""

    noun = "LASER"

    def refuses(self, leaf: Softmax, request: Request) -> str | None:
        width = max(shape[-1] for name, shape in request.shapes if name in ("k", "v"))
        if request.verb != "extend" and request.dtype == "float16" and width > WIDEST_OF_TWO:
            return (
                f"has kernels for LASER in float16 with rows of at most {WIDEST_OF_TWO} "
                f"channels; found {width}"
            )
        return super().refuses(leaf, request)

    def forward(
        self, leaf: Softmax, x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        q, k, v = inputs_of(x)
        spreads = spread(v, masks_of(frame, *q.shape[:2]).k_valid)
        call = call_of(leaf, q, k, weights(v, spreads), frame, spreads.is_close)
        out = empty(v, (*q.shape[:3], v.shape[3]))
        full = empty(v, out.shape, "float32")
        log_total = attend(call, None, full)
        _by_rows(out, f"outputs<{cpp_type(v)}>", (full, log_total, *spreads, out), v.shape[2])
        laser_exact.forward(call, v, out, full, log_total)
        return out, (log_total, *spreads, full)

    def backward(
        self,
        leaf: Softmax,
        x: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        q, k, v = inputs_of(x)
        log_total, *spread_of, full = residuals
        spreads = ValueSpread(*spread_of)
        d_out = in_one_piece(cast(cotangent, v.dtype))
        call = call_of(leaf, q, k, weights(v, spreads), frame, spreads.is_close)
        result = {name: empty(a, a.shape) for name, a in (("q", q), ("k", k), ("v", v))}
        _close_backward(call, v, spreads, full, log_total, d_out, result)
        laser_exact.backward(call, v, full, log_total, d_out, result)
        return {name: cast(d, x[name].dtype) for name, d in result.items()}

    def residual_shapes(
        self, leaf: Softmax, inputs: Mapping[str, ArraySpec]
    ) -> tuple[ArraySpec, ...]:
        b, t, h, _ = inputs["q"].shape
        (_, _, n, e), _ = inputs["v"]
        return (
            ArraySpec((b, h, t), "float32"),
            ArraySpec((b, n, e), "float32"),
            ArraySpec((b, n, e), "float32"),
            ArraySpec((b, n), "int32"),
            ArraySpec((b, t, h, e), "float32"),
        )


def spread(v: Array, k_valid: Array | None) -> ValueSpread:
    """The range of the valid values."""
    b, s, n, e = v.shape
    segments = -(-s // SEGMENT)
    largest, smallest = (empty(v, (b, n, segments, e), "float32") for _ in range(2))
    launch(
        "laser_close",
        f"value_ranges<{cpp_type(v)}>",
        (segments, n, b),
        128,
        (v, k_valid, largest, smallest, s, n, e, SEGMENT),
    )
    shift, less = (empty(v, (b, n, e), "float32") for _ in range(2))
    is_close = empty(v, (b, n), "int32")
    launch(
        "laser_close",
        "spread",
        (b * n,),
        32,
        (largest, smallest, shift, less, is_close, segments, e, RANGE["float32"]),
    )
    return ValueSpread(shift, less, is_close)


def weights(v: Array, spreads: ValueSpread) -> Values:
    """W (b, s, n, e) of close heads; undefined in other heads, and at masked keys."""
    w = _factors(v, v.shape)
    kernel = f"weights<{cpp_type(v)}, {w.cpp_type}, {w.parts}>"
    _by_rows(v, kernel, (v, *spreads, *w), None)
    return w


def _factors(v: Array, shape: tuple[int, ...]) -> Values:
    """Uninitialized arrays for exponentials; for float16, in two parts of bfloat16."""
    if v.dtype == "float16":
        return Values(*(empty(v, shape, _bfloat16()) for _ in range(2)))
    return Values(empty(v, shape))


def _bfloat16() -> DType:
    """The dtype of arrays of bfloat16 for kernels; CuPy has bfloat16 only with ml_dtypes."""
    if not is_simulated():
        return "uint16"
    import ml_dtypes

    return ml_dtypes.bfloat16


def _close_backward(
    call: SoftmaxCall,
    v: Array,
    spreads: ValueSpread,
    full: Array,
    log_total: Array,
    d_out: Array,
    result: Arrays,
) -> None:
    g, n = _factors(v, d_out.shape), v.shape[2]
    d_sum = empty(log_total, log_total.shape)
    kernel = f"cotangents<{cpp_type(v)}, {g.cpp_type}, {g.parts}>"
    arguments = (d_out, full, log_total, spreads.less, spreads.is_close, *g, d_sum)
    _by_rows(d_out, kernel, arguments, n)
    query_gradient(call, g, log_total, d_sum, result["q"])
    d_w = empty(v, v.shape, "float32")
    key_gradient(call, g, log_total, d_sum, result["k"], None, d_w)
    of_values = (v, spreads.shift, spreads.is_close, d_w, result["v"])
    _by_rows(v, f"value_gradients<{cpp_type(v)}>", of_values, None)


def _by_rows(rows: Array, kernel: str, arguments: tuple[Argument, ...], n: int | None) -> None:
    """One warp for each row (b, tokens, heads, e); `n` is the number of kv heads if other."""
    b, tokens, heads, e = rows.shape
    sizes = (tokens, heads, e) if n is None else (tokens, heads, n, e)
    grid = (-(-tokens // WARPS), heads, b)
    launch("laser_close", kernel, grid, 32 * WARPS, (*arguments, *sizes))
