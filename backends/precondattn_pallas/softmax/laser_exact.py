"""LASER with values of any range, one key at a time, in memory linear in the number of tokens.

    o_ic = log Σ_j e^{s_ij + v_jc} − λ_i,    w_ijc = e^{s_ij − λ_i + v_jc − o_ic},
    dv_jc = Σ_i do_ic w_ijc,    dS_ij = Σ_c do_ic (w_ijc − a_ij).

It serves calls whose values are too far apart for one shift, at t s e exponentials per head. It is
a loop of XLA, not a kernel. Arrays are (b, heads, tokens, channels) in float32, with one head of
keys for each head of queries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from precondattn.arrays import Array
from precondattn_pallas.softmax.score_tiles import SegmentRuns, StaticMask, visible

HIGHEST = lax.Precision.HIGHEST


def _scores(
    mask: StaticMask, scale: float, q: Array, key: Array, j: Array, segments: Array
) -> Array:
    """s_ij of one key j (b, h, t), −∞ where it is masked."""
    scores = scale * jnp.einsum("bhtd,bhd->bht", q, key, precision=HIGHEST)
    runs = (None, None)
    if segments is not None:
        key_segment = lax.dynamic_index_in_dim(segments.key, j, 1, keepdims=True)
        runs = segments.q_run[:, None], key_segment[:, None]
    rows = jnp.arange(q.shape[2], dtype=jnp.int32)[None, None]
    return jnp.where(visible(mask, rows, j, *runs), scores, -jnp.inf)


def _keys(k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Arrays with the keys' axis first."""
    count = jnp.arange(k.shape[2], dtype=jnp.int32)
    return count, jnp.moveaxis(k, 2, 0), jnp.moveaxis(v, 2, 0)


def forward(
    mask: StaticMask, scale: float, q: Array, k: Array, v: Array, segments: SegmentRuns | None
) -> tuple[Array, Array]:
    """o (b, h, t, e), and λ (b, h, t), ∞ in rows without visible keys."""

    def one(carried: Array, scanned: Array) -> Array:
        largest, total, of_scores = carried
        j, key, value = scanned
        scores = _scores(mask, scale, q, key, j, segments)
        shifted = scores[..., None] + value[:, :, None, :]
        higher = jnp.maximum(largest, shifted)
        base = jnp.where(higher == -jnp.inf, 0.0, higher)
        total = total * jnp.exp(largest - base) + jnp.exp(shifted - base)
        return (higher, total, jnp.logaddexp(of_scores, scores)), None

    shape = (*q.shape[:3], v.shape[3])
    empty = jnp.full(shape, -jnp.inf, jnp.float32)
    start = (empty, jnp.zeros(shape, jnp.float32), empty[..., 0])
    (largest, total, logs), _ = lax.scan(one, start, _keys(k, v))
    some = logs[..., None] > -jnp.inf
    o = jnp.where(some, largest, 0.0) + jnp.log(jnp.where(some, total, 1.0))
    return jnp.where(some, o - logs[..., None], 0.0), jnp.where(logs > -jnp.inf, logs, jnp.inf)


def backward(
    mask: StaticMask,
    scale: float,
    q: Array,
    k: Array,
    v: Array,
    segments: SegmentRuns | None,
    o: Array,
    log_total: Array,
    d_o: Array,
) -> tuple[Array, Array, Array]:
    """dq, dk and dv, of the arrays' shapes."""
    sums = jnp.sum(d_o, axis=3)

    def one(d_q: Array, scanned: Array) -> Array:
        j, key, value = scanned
        logs = _scores(mask, scale, q, key, j, segments) - log_total
        weighted = d_o * jnp.exp(logs[..., None] + (value[:, :, None, :] - o))
        d_scores = scale * (jnp.sum(weighted, axis=3) - jnp.exp(logs) * sums)
        d_key = jnp.einsum("bht,bhtd->bhd", d_scores, q, precision=HIGHEST)
        return d_q + d_scores[..., None] * key[:, :, None, :], (d_key, jnp.sum(weighted, axis=2))

    d_q, result = lax.scan(one, jnp.zeros_like(q), _keys(k, v))
    d_k, d_v = jax.tree.map(lambda a: jnp.moveaxis(a, 0, 2), result)
    return d_q, d_k, d_v
