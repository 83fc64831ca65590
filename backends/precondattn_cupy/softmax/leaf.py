"""Softmax attention as a leaf of the backend.

Residuals: λ (b, h, t), in units of log 2, and, where the output is rounded to half precision, the
unrounded output. With D = do · o from it, the rows of dS sum to 0. With the rounded output they
would not, and if all keys were equal, dq would consist of that error.
"""

from __future__ import annotations

from collections.abc import Mapping

from precondattn.arrays import Array, Arrays, Residuals, cast
from precondattn.backend import ArraySpec, Request
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn.kernel_backend.attention_options import logs_and_unrounded
from precondattn.spec.softmax import Softmax
from precondattn_cupy.layout import empty, in_one_piece
from precondattn_cupy.softmax.attention import (
    Values,
    attend,
    call_of,
    key_gradient,
    query_gradient,
    refusal,
    row_products,
)
from precondattn_cupy.softmax.step import refusal_of_step, step


class SoftmaxKernels:
    """Algorithm of `Softmax` whose output is the weighted mean of the values."""

    noun = "attention"
    """What a refusal calls it."""

    def refuses(self, leaf: Softmax, request: Request) -> str | None:
        if request.verb == "extend":
            return refusal_of_step(leaf, request)
        return refusal(self.noun, leaf, request)

    def forward(
        self, leaf: Softmax, x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        q, k, v = inputs_of(x)
        out = empty(v, (*q.shape[:3], v.shape[3]))
        full = None if v.dtype == "float32" else empty(v, out.shape, "float32")
        log_total = attend(call_of(leaf, q, k, Values(v), frame), out, full)
        return out, (log_total,) if full is None else (log_total, full)

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
        log_total, *full = residuals
        d_out = in_one_piece(cast(cotangent, v.dtype))
        call = call_of(leaf, q, k, Values(v), frame)
        d_sum = row_products(call, d_out, full[0] if full else in_one_piece(out), log_total)
        d_q, d_k, d_v = (empty(a, a.shape) for a in (q, k, v))
        query_gradient(call, Values(d_out), log_total, d_sum, d_q)
        key_gradient(call, Values(d_out), log_total, d_sum, d_k, d_v, None)
        result = {"q": d_q, "k": d_k, "v": d_v}
        return {name: cast(d, x[name].dtype) for name, d in result.items()}

    def step(
        self, leaf: Softmax, past: Mapping[str, Array], x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Updates]:
        return step(leaf, past, x, frame)

    def residual_shapes(
        self, leaf: Softmax, inputs: Mapping[str, ArraySpec]
    ) -> tuple[ArraySpec, ...]:
        return logs_and_unrounded(inputs)


def inputs_of(x: Mapping[str, Array]) -> tuple[Array, Array, Array]:
    """Queries, keys and values, in the dtype of the values and contiguous."""
    dtype = x["v"].dtype
    q, k, v = (in_one_piece(cast(x[name], dtype)) for name in "qkv")
    return q, k, v
