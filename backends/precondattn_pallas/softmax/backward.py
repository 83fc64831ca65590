"""The gradient of softmax attention, as in flash attention: A is recomputed in tiles from λ.

    A = e^{S − λ},    D_i = do_i · o_i,    dA = do vᵀ,    dS = A ∘ (dA − D),
    dq = s dS k,    dk = s dSᵀ q,    dv = Aᵀ do.

One kernel owns tiles of queries, another tiles of keys with all query heads that read them. No two
programs add to the same element, so the result is deterministic.

In bfloat16, dS is rounded before its products. It is multiplied as tf32 in a precise kernel, since
its sums cancel where keys are nearly equal, and in float16, whose range it exceeds.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from precondattn.arrays import Array, Arrays
from precondattn_pallas.launch import References, loop
from precondattn_pallas.softmax.forward import SoftmaxTiling, launch_tiles
from precondattn_pallas.softmax.score_tiles import SegmentRuns, visible


def query_gradient(x: References, out: References, *, tiling: SoftmaxTiling) -> None:
    """A tile of dq / s."""
    rows, columns = tiling.tile[:2]
    q, d_o, logs, d_sum = (x[name][...] for name in ("q", "d_o", "log_total", "d_sum"))
    row = pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    offset = lax.broadcasted_iota(jnp.int32, (rows, columns), 1)

    def add(index: Array, acc: Array) -> Array:
        j = pl.ds(index * columns, columns)
        k = x["k"][j, :]
        scores = tiling.products.dot(q, k, right=True) * tiling.scale
        runs = (None, None)
        if "k_run" in x:
            runs = x["q_run"][...][:, None], x["k_run"][j][None, :]
        is_visible = visible(tiling.mask, row, index * columns + offset, *runs)
        a = jnp.exp2(jnp.where(is_visible, scores - logs[:, None], -jnp.inf))
        d_a = tiling.products.dot(d_o, x["v"][j, :], right=True)
        d_scores = a * (d_a - d_sum[:, None])
        return acc + tiling.times(d_scores, k)

    out["d_q"][...] = loop(x["low"][0], x["high"][0], add, jnp.zeros((rows, tiling.d), jnp.float32))


def key_gradient(x: References, out: References, *, tiling: SoftmaxTiling) -> None:
    """A tile of dk / s and dv, from all queries that attend to it; tiles are keys × queries."""
    rows, columns = tiling.tile[:2]
    k, v = x["k"][...], x["v"][...]
    key = pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    offset = lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
    low, high = x["low"][0], x["high"][0]

    def of_head(head: Array, carried: Array) -> Array:
        def add(index: Array, carried: tuple[Array, Array]) -> tuple[Array, Array]:
            d_k, d_v = carried
            i = pl.ds(index * columns, columns)
            q, d_o = x["q"][i, head, :], x["d_o"][i, head, :]
            logs, d_sum = x["log_total"][head, i], x["d_sum"][head, i]
            scores = tiling.products.dot(k, q, right=True) * tiling.scale
            runs = (None, None)
            if "k_run" in x:
                runs = x["q_run"][i][None, :], x["k_run"][...][:, None]
            is_visible = visible(tiling.mask, index * columns + offset, key, *runs)
            a = jnp.exp2(jnp.where(is_visible, scores - logs[None, :], -jnp.inf))
            d_v += tiling.products.dot(a.astype(d_o.dtype), d_o)
            d_a = tiling.products.dot(v, d_o, right=True)
            d_scores = a * (d_a - d_sum[None, :])
            return d_k + tiling.times(d_scores, q), d_v

        return loop(low, high, add, carried)

    empty = jnp.zeros((rows, tiling.d), jnp.float32), jnp.zeros((rows, tiling.e), jnp.float32)
    d_k, d_v = loop(0, x["q"].shape[1], of_head, empty)
    out["d_k"][...], out["d_v"][...] = d_k, d_v


def d_queries(tiling: SoftmaxTiling, x: Arrays, segments: SegmentRuns | None) -> Array:
    """dq / s (b, t, h, d) in float32. For x see `launch_tiles`."""
    _, t, _, d = x["q"].shape
    result = launch_tiles(query_gradient, tiling, x, segments, {"d_q": tiling.d})
    return result["d_q"][:, :t, :, :d]


def d_keys_and_values(
    tiling: SoftmaxTiling, x: Arrays, segments: SegmentRuns | None
) -> tuple[Array, Array]:
    """dk / s (b, s, n, d) and dv (b, s, n, e) in float32."""
    d, (_, s, _, e) = x["q"].shape[3], x["v"].shape
    outputs = {"d_k": tiling.d, "d_v": tiling.e}
    result = launch_tiles(key_gradient, tiling, x, segments, outputs, by_keys=True)
    return result["d_k"][:, :s, :, :d], result["d_v"][:, :s, :, :e]
