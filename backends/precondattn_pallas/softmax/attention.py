"""Softmax attention (flash attention) as an algorithm of the backend: supported calls, launches.

Residuals: λ (b, h, t), in units of log 2, and, where the output is rounded to half precision, the
unrounded output. With D = do · o from it, the rows of dS sum to 0. With the rounded output they
would not, and if all keys were equal, dq would consist of that error.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from precondattn.arrays import Array, Arrays, DType, Residuals
from precondattn.backend import ArraySpec, Request
from precondattn.frame import Frame
from precondattn.kernel_backend.attention_options import declined_option, logs_and_unrounded
from precondattn.kernel_backend.limits import MOST_HEADS, padded_width
from precondattn.spec.metric import DOT
from precondattn.spec.softmax import Softmax
from precondattn_pallas.arrays import where_valid
from precondattn_pallas.configurations import configuration
from precondattn_pallas.precision import LOG2_E, attention_products
from precondattn_pallas.softmax.backward import d_keys_and_values, d_queries
from precondattn_pallas.softmax.forward import SoftmaxTiling, attend
from precondattn_pallas.softmax.score_tiles import SegmentRuns, StaticMask, segments_of

WIDEST = {"float32": 128, "bfloat16": 256, "float16": 256}
"""The widest keys and values, limited by a multiprocessor's registers."""

Heads = tuple[Array, Array, Array]
"""Queries, keys and values."""

Masks = tuple[Array, Array, Array]
"""Validity of queries, of keys, and the keys' segments; None where all are valid or equal."""


class SoftmaxPlan(NamedTuple):
    """Sizes and options of a call, which are known before it runs."""

    scale: float
    forward: SoftmaxTiling
    query_gradient: SoftmaxTiling
    key_gradient: SoftmaxTiling


def plan_of(leaf: Softmax, q: Array, k: Array, v: Array, *, interpret: bool) -> SoftmaxPlan:
    d, e = padded_width(q.shape[3]), padded_width(v.shape[3])
    scale = leaf.scale_for(q.shape[3])
    mask = StaticMask(q.shape[1], k.shape[1], leaf.causal, leaf.window)
    multiplied, rounds = attention_products(v.dtype, interpret=interpret)

    def tiling(kernel: str) -> SoftmaxTiling:
        tile = configuration(f"attention_{kernel}", max(d, e), v.dtype.itemsize == 2)
        return SoftmaxTiling(mask, scale * LOG2_E, multiplied, tile, d, e, rounds)

    return SoftmaxPlan(scale, tiling("forward"), tiling("query_gradient"), tiling("key_gradient"))


def valid_heads(heads: Heads, masks: Masks) -> Heads:
    """q, k and v, 0 at padding and masked keys."""
    (q, k, v), (q_valid, k_valid, _) = heads, masks
    return where_valid(q_valid, q), where_valid(k_valid, k), where_valid(k_valid, v)


@partial(jax.jit, static_argnums=0)
def _forward(plan: SoftmaxPlan, heads: Heads, masks: Masks) -> tuple[Array, Residuals]:
    v = heads[2]
    segments = segments_of(plan.forward.mask, v.shape[0], *masks[1:])
    out, log_total = attend(plan.forward, *valid_heads(heads, masks), segments)
    out = where_valid(masks[0], out)
    if v.dtype == jnp.float32:
        return out, (log_total,)
    return out.astype(v.dtype), (log_total, out)


@partial(jax.jit, static_argnums=0)
def _backward(
    plan: SoftmaxPlan, heads: Heads, masks: Masks, out: Array, residuals: Residuals, d_o: Array
) -> Heads:
    log_total, *full = residuals
    out, d_o = full[0] if full else out, d_o.astype(heads[2].dtype)
    segments = segments_of(plan.forward.mask, out.shape[0], *masks[1:])
    d_o, out = where_valid(masks[0], d_o), where_valid(masks[0], out)
    return gradients(plan, valid_heads(heads, masks), segments, out, log_total, d_o)


def gradients(
    plan: SoftmaxPlan,
    heads: Heads,
    segments: SegmentRuns | None,
    out: Array,
    log_total: Array,
    d_o: Array,
) -> Heads:
    """The gradients of q, k and v by the kernels."""
    d_sum = jnp.sum(d_o.astype(jnp.float32) * out.astype(jnp.float32), axis=3)
    x = dict(zip("qkv", heads, strict=True))
    x |= {"d_o": d_o, "log_total": log_total, "d_sum": jnp.swapaxes(d_sum, 1, 2)}
    d_k, d_v = d_keys_and_values(plan.key_gradient, x, segments)
    d_q = d_queries(plan.query_gradient, x, segments)
    return plan.scale * d_q, plan.scale * d_k, d_v


class SoftmaxKernels:
    """Algorithm of `Softmax` whose output is the weighted mean of the values."""

    attended, pulled = staticmethod(_forward), staticmethod(_backward)
    """The functions that run a planned call and its gradient."""

    def __init__(self, *, interpret: bool) -> None:
        self.interpret = interpret

    def factor_dtype(self, dtype: DType) -> DType:
        """The dtype of what is multiplied by weights, for values of a dtype."""
        return dtype

    def refuses(self, leaf: Softmax, request: Request) -> str | None:
        if leaf.metric != DOT:
            return f"has kernels for attention with scores <q, k> only, not of {leaf.name}"
        reason = declined_option(leaf, "attention")
        if reason is not None:
            return reason
        shapes = dict(request.shapes)
        if 0 in shapes["q"] + shapes["v"]:
            return "its attention supports no empty arrays"
        widest = WIDEST[request.dtype]
        for name, role in (("k", "keys"), ("v", "values")):
            if shapes[name][3] > widest:
                return (
                    f"has kernels for attention in {request.dtype} with {role} whose width is at "
                    f"most {widest}; found {shapes[name][3]}"
                )
        if max(shapes["q"][0], shapes["q"][2]) > MOST_HEADS:
            return f"has kernels for attention of at most {MOST_HEADS} sequences, and as many heads"
        return None

    def forward(
        self, leaf: Softmax, x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        result: tuple[Array, Residuals] = self.attended(*self._planned(leaf, x), masks_of(frame))
        return result

    def backward(
        self,
        leaf: Softmax,
        x: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        planned, masks = self._planned(leaf, x), masks_of(frame)
        result = self.pulled(*planned, masks, out, residuals, cotangent)
        return {name: d.astype(x[name].dtype) for name, d in zip("qkv", result, strict=True)}

    def _planned(self, leaf: Softmax, x: Mapping[str, Array]) -> tuple[SoftmaxPlan, Heads]:
        """The plan, and queries, keys and values in the dtype of the values."""
        dtype = x["v"].dtype
        q, k, v = (x[name].astype(dtype) for name in "qkv")
        like = jax.ShapeDtypeStruct(v.shape, self.factor_dtype(dtype))
        return plan_of(leaf, q, k, like, interpret=self.interpret), (q, k, v)

    def residual_shapes(
        self, leaf: Softmax, inputs: Mapping[str, ArraySpec]
    ) -> tuple[ArraySpec, ...]:
        return logs_and_unrounded(inputs)


def masks_of(frame: Frame) -> Masks:
    return frame.q_valid, frame.k_valid, frame.k_segment
