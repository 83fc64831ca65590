"""The gradient of softmax attention, in tiles, from λ.

    A = e^{S − λ},    D_i = do_i · o_i,    dA = do vᵀ,    dS = A ∘ (dA − D),
    dq = s dS k,    dk = s dSᵀ q,    dv = Aᵀ do.

One kernel owns tiles of queries, another tiles of keys with all query heads that read them: nothing
is added to from two programs, and the result is the same every time.

Products with dS are of 32 bits (tf32 for half precision): float16 has not its range, and where keys
are alike its sums cancel, so that bfloat16 has too few digits.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from precondattn_pallas.launch import divide, launch, loop, shape_of, whole
from precondattn_pallas.softmax.forward import Cut, of_each
from precondattn_pallas.softmax.score_tiles import (
    Segments,
    filled,
    filled_runs,
    met_by_keys,
    met_by_queries,
    visible,
)


def query_gradient(x: Any, out: Any, *, cut: Cut) -> None:
    """A tile of dq / s."""
    rows, columns = cut.tile[:2]
    q, d_o, logs, d_sum = (x[name][...] for name in ("q", "d_o", "log_total", "d_sum"))
    row = pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    place = lax.broadcasted_iota(jnp.int32, (rows, columns), 1)

    def add(index: Any, acc: Any) -> Any:
        j = pl.ds(index * columns, columns)
        k = x["k"][j, :]
        scores = cut.products.dot(q, k, right=True) * cut.scale
        runs = (None, None)
        if "k_run" in x:
            runs = x["q_run"][...][:, None], x["k_run"][j][None, :]
        seen = visible(cut.sight, row, index * columns + place, *runs)
        a = jnp.exp2(jnp.where(seen, scores - logs[:, None], -jnp.inf))
        d_a = cut.products.dot(d_o, x["v"][j, :], right=True)
        d_scores = a * (d_a - d_sum[:, None])
        return acc + cut.products.dot(d_scores, k.astype(jnp.float32))

    out["d_q"][...] = loop(x["low"][0], x["high"][0], add, jnp.zeros((rows, cut.d), jnp.float32))


def key_gradient(x: Any, out: Any, *, cut: Cut) -> None:
    """A tile of dk / s and dv, from all queries that read it; tiles are keys × queries."""
    rows, columns = cut.tile[:2]
    k, v = x["k"][...], x["v"][...]
    key = pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    place = lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
    low, high = x["low"][0], x["high"][0]

    def of_head(head: Any, carried: Any) -> Any:
        def add(index: Any, carried: tuple[Any, Any]) -> tuple[Any, Any]:
            d_k, d_v = carried
            i = pl.ds(index * columns, columns)
            q, d_o = x["q"][i, head, :], x["d_o"][i, head, :]
            logs, d_sum = x["log_total"][head, i], x["d_sum"][head, i]
            scores = cut.products.dot(k, q, right=True) * cut.scale
            runs = (None, None)
            if "k_run" in x:
                runs = x["q_run"][i][None, :], x["k_run"][...][:, None]
            seen = visible(cut.sight, index * columns + place, key, *runs)
            a = jnp.exp2(jnp.where(seen, scores - logs[None, :], -jnp.inf))
            d_v += cut.products.dot(a.astype(d_o.dtype), d_o)
            d_a = cut.products.dot(v, d_o, right=True)
            d_scores = a * (d_a - d_sum[None, :])
            return d_k + cut.products.dot(d_scores, q.astype(jnp.float32)), d_v

        return loop(low, high, add, carried)

    empty = jnp.zeros((rows, cut.d), jnp.float32), jnp.zeros((rows, cut.e), jnp.float32)
    d_k, d_v = loop(0, x["q"].shape[1], of_head, empty)
    out["d_k"][...], out["d_v"][...] = d_k, d_v


def d_queries(cut: Cut, x: dict[str, Any], segments: Segments | None) -> Any:
    """dq / s (b, t, h, d) in float32.

    x has q, k, v and d_o as (b, tokens, heads, channels), log_total and d_sum as (b, h, t).
    """
    rows, columns = cut.tile[:2]
    b, t, h, d = x["q"].shape
    s, n = x["k"].shape[1:3]
    group = h // n
    tiles, s_filled = whole(t, rows), whole(s, columns) * columns
    t_filled = tiles * rows
    low, high = met_by_queries(cut.sight, segments, rows, columns)

    def of_tile(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, None, width), lambda i, h, b: (b, i, h, 0))

    def of_keys(width: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, s_filled, None, width), lambda i, h, b: (b, 0, divide(h, group), 0)
        )

    of_rows = pl.BlockSpec((None, None, rows), lambda i, h, b: (b, h, i))
    inputs = {
        "q": (filled(x["q"], t_filled, cut.d), of_tile(cut.d)),
        "d_o": (filled(x["d_o"], t_filled, cut.e), of_tile(cut.e)),
        "k": (filled(x["k"], s_filled, cut.d), of_keys(cut.d)),
        "v": (filled(x["v"], s_filled, cut.e), of_keys(cut.e)),
        "log_total": (_filled_rows(x["log_total"], t_filled, jnp.inf), of_rows),
        "d_sum": (_filled_rows(x["d_sum"], t_filled, 0.0), of_rows),
        "low": (low, of_each(low)),
        "high": (high, of_each(high)),
    }
    if segments is not None:
        own = pl.BlockSpec((None, rows), lambda i, h, b: (b, i))
        other = pl.BlockSpec((None, s_filled), lambda i, h, b: (b, 0))
        inputs["q_run"] = (filled_runs(segments.q_run, t_filled, -2), own)
        inputs["k_run"] = (filled_runs(segments.key, s_filled, -1), other)
    shape = shape_of((b, t_filled, h, cut.d), jnp.float32)
    found = launch(
        query_gradient,
        (tiles, h, b),
        inputs,
        {"d_q": (shape, of_tile(cut.d))},
        cut.tile,
        interpret=cut.products.interpret,
        cut=cut,
    )
    return found["d_q"][:, :t, :, :d]


def d_keys_and_values(cut: Cut, x: dict[str, Any], segments: Segments | None) -> tuple[Any, Any]:
    """dk / s (b, s, n, d) and dv (b, s, n, e) in float32."""
    rows, columns = cut.tile[:2]
    (b, t, h, d), (_, s, n, e) = x["q"].shape, x["v"].shape
    group = h // n
    tiles, t_filled = whole(s, rows), whole(t, columns) * columns
    s_filled = tiles * rows
    low, high = met_by_keys(cut.sight, segments, rows, columns)

    def of_tile(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, None, width), lambda j, n, b: (b, j, n, 0))

    def of_queries(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, t_filled, group, width), lambda j, n, b: (b, 0, n, 0))

    of_rows = pl.BlockSpec((None, group, t_filled), lambda j, n, b: (b, n, 0))
    inputs = {
        "q": (filled(x["q"], t_filled, cut.d), of_queries(cut.d)),
        "d_o": (filled(x["d_o"], t_filled, cut.e), of_queries(cut.e)),
        "k": (filled(x["k"], s_filled, cut.d), of_tile(cut.d)),
        "v": (filled(x["v"], s_filled, cut.e), of_tile(cut.e)),
        "log_total": (_filled_rows(x["log_total"], t_filled, jnp.inf), of_rows),
        "d_sum": (_filled_rows(x["d_sum"], t_filled, 0.0), of_rows),
        "low": (low, of_each(low)),
        "high": (high, of_each(high)),
    }
    if segments is not None:
        other = pl.BlockSpec((None, t_filled), lambda j, n, b: (b, 0))
        own = pl.BlockSpec((None, rows), lambda j, n, b: (b, j))
        inputs["q_run"] = (filled_runs(segments.q_run, t_filled, -2), other)
        inputs["k_run"] = (filled_runs(segments.key, s_filled, -1), own)
    found = launch(
        key_gradient,
        (tiles, n, b),
        inputs,
        {
            "d_k": (shape_of((b, s_filled, n, cut.d), jnp.float32), of_tile(cut.d)),
            "d_v": (shape_of((b, s_filled, n, cut.e), jnp.float32), of_tile(cut.e)),
        },
        cut.tile,
        interpret=cut.products.interpret,
        cut=cut,
    )
    return found["d_k"][:, :s, :, :d], found["d_v"][:, :s, :, :e]


def _filled_rows(array: Any, tokens: int, filler: float) -> Any:
    """(b, h, t), to so many tokens; where λ = ∞, all weights vanish."""
    missing = tokens - array.shape[2]
    return jnp.pad(array, ((0, 0), (0, 0), (0, missing)), constant_values=filler)
