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
from precondattn_pallas.launch import References, divide, launch, loop, shape_of, whole
from precondattn_pallas.softmax.forward import SoftmaxTiling, of_each
from precondattn_pallas.softmax.score_tiles import (
    SegmentRuns,
    met_by_keys,
    met_by_queries,
    padded,
    padded_runs,
    visible,
)


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
    """dq / s (b, t, h, d) in float32.

    x has q, k, v and d_o as (b, tokens, heads, channels), log_total and d_sum as (b, h, t).
    """
    rows, columns = tiling.tile[:2]
    b, t, h, d = x["q"].shape
    s, n = x["k"].shape[1:3]
    group = h // n
    tiles, s_padded = whole(t, rows), whole(s, columns) * columns
    t_padded = tiles * rows
    low, high = met_by_queries(tiling.mask, segments, rows, columns)

    def of_tile(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, None, width), lambda i, h, b: (b, i, h, 0))

    def of_keys(width: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, s_padded, None, width), lambda i, h, b: (b, 0, divide(h, group), 0)
        )

    of_rows = pl.BlockSpec((None, None, rows), lambda i, h, b: (b, h, i))
    inputs = {
        "q": (padded(x["q"], t_padded, tiling.d), of_tile(tiling.d)),
        "d_o": (padded(x["d_o"], t_padded, tiling.e), of_tile(tiling.e)),
        "k": (padded(x["k"], s_padded, tiling.d), of_keys(tiling.d)),
        "v": (padded(x["v"], s_padded, tiling.e), of_keys(tiling.e)),
        "log_total": (_padded_rows(x["log_total"], t_padded, jnp.inf), of_rows),
        "d_sum": (_padded_rows(x["d_sum"], t_padded, 0.0), of_rows),
        "low": (low, of_each(low)),
        "high": (high, of_each(high)),
    }
    if segments is not None:
        row_spec = pl.BlockSpec((None, rows), lambda i, h, b: (b, i))
        other = pl.BlockSpec((None, s_padded), lambda i, h, b: (b, 0))
        inputs["q_run"] = (padded_runs(segments.q_run, t_padded, -2), row_spec)
        inputs["k_run"] = (padded_runs(segments.key, s_padded, -1), other)
    shape = shape_of((b, t_padded, h, tiling.d), jnp.float32)
    result = launch(
        query_gradient,
        (tiles, h, b),
        inputs,
        {"d_q": (shape, of_tile(tiling.d))},
        tiling.tile,
        interpret=tiling.products.interpret,
        tiling=tiling,
    )
    return result["d_q"][:, :t, :, :d]


def d_keys_and_values(
    tiling: SoftmaxTiling, x: Arrays, segments: SegmentRuns | None
) -> tuple[Array, Array]:
    """dk / s (b, s, n, d) and dv (b, s, n, e) in float32."""
    rows, columns = tiling.tile[:2]
    (b, t, h, d), (_, s, n, e) = x["q"].shape, x["v"].shape
    group = h // n
    tiles, t_padded = whole(s, rows), whole(t, columns) * columns
    s_padded = tiles * rows
    low, high = met_by_keys(tiling.mask, segments, rows, columns)

    def of_tile(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, None, width), lambda j, n, b: (b, j, n, 0))

    def of_queries(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, t_padded, group, width), lambda j, n, b: (b, 0, n, 0))

    of_rows = pl.BlockSpec((None, group, t_padded), lambda j, n, b: (b, n, 0))
    inputs = {
        "q": (padded(x["q"], t_padded, tiling.d), of_queries(tiling.d)),
        "d_o": (padded(x["d_o"], t_padded, tiling.e), of_queries(tiling.e)),
        "k": (padded(x["k"], s_padded, tiling.d), of_tile(tiling.d)),
        "v": (padded(x["v"], s_padded, tiling.e), of_tile(tiling.e)),
        "log_total": (_padded_rows(x["log_total"], t_padded, jnp.inf), of_rows),
        "d_sum": (_padded_rows(x["d_sum"], t_padded, 0.0), of_rows),
        "low": (low, of_each(low)),
        "high": (high, of_each(high)),
    }
    if segments is not None:
        other = pl.BlockSpec((None, t_padded), lambda j, n, b: (b, 0))
        row_spec = pl.BlockSpec((None, rows), lambda j, n, b: (b, j))
        inputs["q_run"] = (padded_runs(segments.q_run, t_padded, -2), other)
        inputs["k_run"] = (padded_runs(segments.key, s_padded, -1), row_spec)
    result = launch(
        key_gradient,
        (tiles, n, b),
        inputs,
        {
            "d_k": (shape_of((b, s_padded, n, tiling.d), jnp.float32), of_tile(tiling.d)),
            "d_v": (shape_of((b, s_padded, n, tiling.e), jnp.float32), of_tile(tiling.e)),
        },
        tiling.tile,
        interpret=tiling.products.interpret,
        tiling=tiling,
    )
    return result["d_k"][:, :s, :, :d], result["d_v"][:, :s, :, :e]


def _padded_rows(array: Array, tokens: int, filler: float) -> Array:
    """(b, h, t) padded to `tokens`; with λ = ∞ all weights are 0."""
    missing = tokens - array.shape[2]
    return jnp.pad(array, ((0, 0), (0, 0), (0, missing)), constant_values=filler)
