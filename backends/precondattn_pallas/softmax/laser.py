"""LASER by the kernels of softmax attention: o_ic = log Σ_j a_ij e^{v_jc},  a = softmax(s q kᵀ).

A call is *close* if the valid values of every channel differ by at most R. Then, with ν_c their
maximum, no e^{v − ν} underflows, and LASER is softmax attention with values W:

    W = e^{v − ν} − u,    o = ν + log(u + A W),    G = do / (u + A W),    dv = (W + u) ∘ Aᵀ G,

with the gradient of A W at G for q and k. Channels whose values are within log 2 of each other have
u = 1, all others u = 0: this minimises the rounding error of W. A masked value may affect ν and u,
and so the rounding of an output, and nothing else.

All other calls are computed one query at a time, by XLA, at t s e exponentials per head. The device
makes the choice.

Residuals: λ (b, h, t) and A W (b, t, h, e), in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from precondattn.arrays import Array, DType, Residuals
from precondattn.backend import ArraySpec, Request
from precondattn.spec.laser import RANGE
from precondattn.spec.softmax import Softmax
from precondattn_pallas.arrays import where_valid
from precondattn_pallas.softmax.attention import (
    Heads,
    Masks,
    SoftmaxKernels,
    SoftmaxPlan,
    gradients,
    valid_heads,
)
from precondattn_pallas.softmax.forward import attend
from precondattn_pallas.softmax.score_tiles import SegmentRuns, segments_of, visible


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
    def factor(self) -> Array:
        return factor_dtype(self.v.dtype)

    @property
    def weights(self) -> Array:
        """W + u = e^{v − ν}, in float32; at most 1 at valid keys."""
        return jnp.exp(self.v.astype(jnp.float32) - self.spread.shift)

    def with_weights(self, masks: Masks) -> Heads:
        """q, k and W."""
        w = (self.weights - self.spread.less).astype(self.factor)
        return self.q, self.k, where_valid(masks[1], w)

    def of_queries(self, array: Array) -> Array:
        """One number for each query head."""
        return jnp.repeat(array, self.q.shape[2] // array.shape[2], axis=2)

    @property
    def wide(self) -> tuple[Array, Array, Array]:
        return tuple(a.astype(jnp.float32) for a in (self.q, self.k, self.v))

    def exact(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """o (b, t, h, e), and λ (b, h, t), ∞ in rows without visible keys, of arrays in float32."""
        mask, scale = self.plan.forward.mask, self.plan.scale
        k, v = (jnp.swapaxes(self.of_queries(a), 1, 2) for a in (k, v))
        columns = jnp.arange(mask.s, dtype=jnp.int32)[None]

        @jax.checkpoint
        def of_query(x: tuple[Array, Array]) -> tuple[Array, Array]:
            i, query = x
            runs = None, None
            if self.segments is not None:
                runs = lax.dynamic_index_in_dim(self.segments.q_run, i, 1), self.segments.key
            is_visible = visible(mask, i, columns, *runs)[:, None]
            scores = scale * jnp.einsum("bhd,bhsd->bhs", query, k, precision=lax.Precision.HIGHEST)
            some = jnp.any(is_visible, axis=2, keepdims=True)
            scores = jnp.where(some, jnp.where(is_visible, scores, -jnp.inf), 0.0)
            logs = jax.nn.logsumexp(scores, axis=2, keepdims=True)
            o = jax.nn.logsumexp(scores[..., None] + v, axis=2) - logs
            return jnp.where(some, o, 0.0), jnp.where(some, logs, jnp.inf)[..., 0]

        rows = jnp.arange(mask.t, dtype=jnp.int32)
        o, log_total = lax.map(of_query, (rows, jnp.moveaxis(q, 1, 0)))
        return jnp.moveaxis(o, 0, 1), jnp.moveaxis(log_total, 0, 2)


def _call(plan: SoftmaxPlan, heads: Heads, masks: Masks) -> _LaserCall:
    q, k, v = valid_heads(heads, masks)
    segments = segments_of(plan.forward.mask, v.shape[0], *masks[1:])
    return _LaserCall(plan, q, k, v, segments, _spread(v, masks[1]))


@partial(jax.jit, static_argnums=0)
def _forward(plan: SoftmaxPlan, heads: Heads, masks: Masks) -> tuple[Array, Residuals]:
    call = _call(plan, heads, masks)

    def close() -> Array:
        shift, less = map(call.of_queries, call.spread[:2])
        mean, log_total = attend(plan.forward, *call.with_weights(masks), call.segments)
        some = jnp.swapaxes(log_total, 1, 2)[..., None] < jnp.inf
        return (
            jnp.where(some, shift + jnp.log(jnp.where(some, less + mean, 1.0)), 0.0),
            mean,
            log_total,
        )

    def exact() -> Array:
        o, log_total = call.exact(*call.wide)
        return o, jnp.zeros_like(o), log_total

    o, mean, log_total = lax.cond(call.spread.is_close, close, exact)
    o = where_valid(masks[0], o)
    return o.astype(call.v.dtype), (log_total, mean)


@partial(jax.jit, static_argnums=0)
def _backward(
    plan: SoftmaxPlan, heads: Heads, masks: Masks, out: Array, residuals: Residuals, d_o: Array
) -> Heads:
    call = _call(plan, heads, masks)
    log_total, mean = residuals
    d_o = where_valid(masks[0], d_o).astype(jnp.float32)

    def close() -> Array:
        less = call.of_queries(call.spread.less)
        some = jnp.swapaxes(log_total, 1, 2)[..., None] < jnp.inf
        g = jnp.where(some, d_o / jnp.where(some, less + mean, 1.0), 0.0).astype(call.factor)
        weighted = call.with_weights(masks)
        d_q, d_k, d_w = gradients(plan, weighted, call.segments, mean, log_total, g)
        return d_q, d_k, d_w * call.weights

    def exact() -> Array:
        d_q, d_k, d_v = jax.vjp(lambda *x: call.exact(*x)[0], *call.wide)[1](d_o)
        return d_q, d_k, d_v

    result: Heads = lax.cond(call.spread.is_close, close, exact)
    return result


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
        return ArraySpec((b, h, t), "float32"), wide

    def refuses(self, leaf: Softmax, request: Request) -> str | None:
        if request.dtype == "float16" and max(shape[-1] for _, shape in request.shapes) > 128:
            return "has kernels for LASER in float16 with widths of at most 128"
        return super().refuses(leaf, request)
