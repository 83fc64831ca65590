"""LASER by the kernels of softmax attention: o_ic = log Σ_j a_ij e^{v_jc},  a = softmax(s q kᵀ).

A call is *close* if the valid values of every channel differ by at most R. Then, with ν_c their
maximum, no e^{v − ν} underflows, and LASER is softmax attention with values W:

    W = e^{v − ν} − u,    o = ν + log(u + A W),    G = do / (u + A W),    dv = (W + u) ∘ Aᵀ G,

with the gradient of A W at G for q and k. Channels whose values are within log 2 of each other have
u = 1, all others u = 0: this minimises the rounding error of W. A masked value may affect ν and u,
and so the rounding of an output, and nothing else.

All other calls are computed one key at a time (`laser_exact.py`). The device makes the choice.

Residuals: λ (b, h, t), A W (b, t, h, e) and o (b, t, h, e), in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from precondattn.arrays import Array, Arrays, DType, Residuals
from precondattn.backend import ArraySpec, Request
from precondattn.spec.laser import RANGE
from precondattn.spec.softmax import Softmax
from precondattn_pallas.masks import where_valid
from precondattn_pallas.softmax import laser_exact
from precondattn_pallas.softmax.attention import Masks, SoftmaxKernels, SoftmaxPlan, gradients
from precondattn_pallas.softmax.forward import attend
from precondattn_pallas.softmax.score_tiles import SegmentRuns, segments_of


class ValueSpread(NamedTuple):
    """The range of the values of each key/value head."""

    shift: Array
    """ν (b, 1, n, e)"""
    less: Array
    """u (b, 1, n, e)"""
    is_close: Array
    """Whether the call is close: one truth value"""


def factor_dtype(dtype: DType) -> Array:
    """The dtype of W and G, for values of this dtype: float16's range is too small."""
    return jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32


def _spread(v: Array, valid: Array) -> ValueSpread:
    v = v.astype(jnp.float32)
    counts = jnp.ones((1, v.shape[1], 1, 1), bool) if valid is None else valid[..., None, None]
    high = jnp.max(jnp.where(counts, v, -jnp.inf), axis=1, keepdims=True)
    low = jnp.min(jnp.where(counts, v, jnp.inf), axis=1, keepdims=True)
    # Without valid values there is nothing to shift.
    high, low = (jnp.where(jnp.isfinite(a), a, 0.0) for a in (high, low))
    less = jnp.where(high - low <= math.log(2), 1.0, 0.0)
    return ValueSpread(high, less, jnp.all(high - low <= RANGE["float32"]))


class _LaserCall(NamedTuple):
    """The inputs of forward and backward."""

    plan: SoftmaxPlan
    q: Array
    k: Array
    v: Array
    segments: SegmentRuns | None
    spread: ValueSpread

    @property
    def group(self) -> int:
        return int(self.q.shape[2] // self.k.shape[2])

    @property
    def factor(self) -> Array:
        return factor_dtype(self.v.dtype)

    @property
    def weights(self) -> Array:
        """W + u = e^{v − ν}, in float32; at most 1 at valid keys."""
        return jnp.exp(self.v.astype(jnp.float32) - self.spread.shift)

    def of_queries(self, array: Array) -> Array:
        """One number for each query head."""
        return jnp.repeat(array, self.group, axis=2)

    def by_heads(self) -> tuple[Array, Array, Array]:
        return tuple(
            jnp.swapaxes(a.astype(jnp.float32), 1, 2)
            for a in (self.q, self.of_queries(self.k), self.of_queries(self.v))
        )


def _call(plan: SoftmaxPlan, q: Array, k: Array, v: Array, masks: Masks) -> _LaserCall:
    q_valid, k_valid, k_segment = masks
    segments = segments_of(plan.forward.mask, v.shape[0], k_valid, k_segment)
    q, k, v = where_valid(q_valid, q), where_valid(k_valid, k), where_valid(k_valid, v)
    return _LaserCall(plan, q, k, v, segments, _spread(v, k_valid))


@partial(jax.jit, static_argnums=0)
def _forward(plan: SoftmaxPlan, q: Array, k: Array, v: Array, masks: Masks) -> Array:
    call = _call(plan, q, k, v, masks)

    def close() -> Array:
        shift, less = map(call.of_queries, call.spread[:2])
        w = where_valid(masks[1], (call.weights - call.spread.less).astype(call.factor))
        mean, log_total = attend(plan.forward, call.q, call.k, w, call.segments)
        some = jnp.swapaxes(log_total, 1, 2)[..., None] < jnp.inf
        return (
            jnp.where(some, shift + jnp.log(jnp.where(some, less + mean, 1.0)), 0.0),
            mean,
            log_total,
        )

    def exact() -> Array:
        tiling = plan.forward
        o, log_total = laser_exact.forward(tiling.mask, plan.scale, *call.by_heads(), call.segments)
        o = jnp.swapaxes(o, 1, 2)
        return o, jnp.zeros_like(o), log_total

    o, mean, log_total = lax.cond(call.spread.is_close, close, exact)
    o = where_valid(masks[0], o)
    return o.astype(v.dtype), (log_total, mean, o)


@partial(jax.jit, static_argnums=0)
def _backward(
    plan: SoftmaxPlan,
    q: Array,
    k: Array,
    v: Array,
    masks: Masks,
    out: Array,
    residuals: Residuals,
    d_o: Array,
) -> Arrays:
    call = _call(plan, q, k, v, masks)
    log_total, mean, o = residuals
    d_o = where_valid(masks[0], d_o).astype(jnp.float32)

    def close() -> Array:
        less = call.of_queries(call.spread.less)
        some = jnp.swapaxes(log_total, 1, 2)[..., None] < jnp.inf
        g = jnp.where(some, d_o / jnp.where(some, less + mean, 1.0), 0.0).astype(call.factor)
        d_sum = jnp.sum(g.astype(jnp.float32) * mean, axis=3)
        x = {
            "q": call.q,
            "k": call.k,
            "v": where_valid(masks[1], (call.weights - call.spread.less).astype(call.factor)),
            "d_o": g,
            "log_total": log_total,
            "d_sum": jnp.swapaxes(d_sum, 1, 2),
        }
        d_q, d_k, d_w = gradients(plan, x, call.segments)
        return d_q, d_k, d_w * call.weights

    def exact() -> Array:
        tiling, back = plan.forward, partial(jnp.swapaxes, axis1=1, axis2=2)
        # The output of a padded query is 0, not that of its scores. It has no weights.
        logs = log_total if masks[0] is None else jnp.where(masks[0][:, None], log_total, jnp.inf)
        result = laser_exact.backward(
            tiling.mask, plan.scale, *call.by_heads(), call.segments, back(o), logs, back(d_o)
        )
        d_q, d_k, d_v = map(back, result)
        return d_q, call_sum(d_k), call_sum(d_v)

    def call_sum(array: Array) -> Array:
        """The sum over the query heads of a key/value head."""
        b, s, h, width = array.shape
        return array.reshape(b, s, h // call.group, call.group, width).sum(3)

    result = lax.cond(call.spread.is_close, close, exact)
    return dict(zip("qkv", result, strict=True))


class LaserKernels(SoftmaxKernels):
    """Algorithm of `Softmax` whose output is a log-mean-exp of the values."""

    attended, pulled = staticmethod(_forward), staticmethod(_backward)

    def factor_dtype(self, dtype: DType) -> DType:
        return factor_dtype(dtype)

    def residual_shapes(
        self, leaf: Softmax, inputs: Mapping[str, ArraySpec]
    ) -> tuple[ArraySpec, ...]:
        b, t, h, _ = inputs["q"].shape
        wide = ArraySpec((b, t, h, inputs["v"].shape[3]), "float32")
        return ArraySpec((b, h, t), "float32"), wide, wide

    def refuses(self, leaf: Softmax, request: Request) -> str | None:
        if request.dtype == "float16" and max(shape[-1] for _, shape in request.shapes) > 128:
            return "has kernels for LASER in float16 with widths of at most 128"
        return super().refuses(leaf, request)
