"""How the tokens of a chunk fade from one another, with a decay for each channel: kernels.

    F(A, q, k) = Σ_{j≤i,c} A_ij q_ic k_jc D_ijc

(`channel_tiles.py`), with the scores of q and k its derivative with respect to A, what A reads from
k that with respect to q, and so on. A program has a chunk of one query of each token: for scores it
goes over blocks of channels, for the rest it has one block. For C tokens of d channels, 10 C d / 16
exponentials of a tile's row, and C² d + 160 C d FLOPs; what the r queries of a state make of k's and
the gates' gradients is summed by XLA.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from precondattn_pallas.channel_tiles import (
    TILE,
    d_gates_of,
    gates_of,
    gradients_within,
    read_within,
    scores_within,
)
from precondattn_pallas.chunk_arrays import Grid, Plan, Rows, each_query, empty
from precondattn_pallas.chunk_tiles import every_block
from precondattn_pallas.precision import Products


def _tiles(x: Any, name: str, columns: Any) -> list[Any]:
    """In float32, those of a chunk, or one block of their channels."""
    count = x[name].shape[0] // TILE
    return [x[name][_tokens(b), columns].astype(jnp.float32) for b in range(count)]


def _tokens(tile: int) -> Any:
    return pl.ds(tile * TILE, TILE)


def channel_scores(x: Any, out: Any, *, products: Products, block: int) -> None:
    """dF/dA."""
    count = x["k"].shape[0] // TILE
    lower = [(b, a) for b in range(count) for a in range(b, -1, -1)]

    def add(c: Any, totals: Any) -> Any:
        q, k, g = (_tiles(x, name, c) for name in ("q", "k", "g"))
        gates = [gates_of(products, tile) for tile in g]
        found = []
        for b, a in lower:
            if a == b:
                later, kept = q[b] * gates[b].since, jnp.ones_like(gates[b].total)
                found.append(scores_within(products, q[b], k[b], g[b]))
                continue
            earlier = k[a] * (gates[a].until * kept[None, :])
            found.append(products.dot(later, earlier, right=True))
            kept = kept * gates[a].total
        return [total + tile for total, tile in zip(totals, found, strict=True)]

    zeros = [jnp.zeros((TILE, TILE), jnp.float32) for _ in lower]
    found = every_block(x["k"].shape[1], block, add, zeros)
    for (b, a), tile in zip(lower, found, strict=True):
        out["scores"][_tokens(b), _tokens(a)] = tile
        if a < b:
            out["scores"][_tokens(a), _tokens(b)] = jnp.zeros((TILE, TILE), jnp.float32)


def channel_read(x: Any, out: Any, *, products: Products) -> None:
    """dF/dq."""
    k, g = (_tiles(x, name, slice(None)) for name in ("k", "g"))
    gates = [gates_of(products, tile) for tile in g]
    for b in range(len(k)):
        read, kept = jnp.zeros_like(k[b]), jnp.ones_like(gates[b].total)
        for a in range(b - 1, -1, -1):
            earlier = k[a] * (gates[a].until * kept[None, :])
            read = read + products.dot(x["a"][_tokens(b), _tokens(a)], earlier)
            kept = kept * gates[a].total
        within = read_within(products, x["a"][_tokens(b), _tokens(b)], k[b], g[b])
        out["d_q"][_tokens(b), :] = within + read * gates[b].since


def channel_gradient(x: Any, out: Any, *, products: Products) -> None:
    """dF/dq, dF/dk and dF/dg."""
    q, k, g = (_tiles(x, name, slice(None)) for name in ("q", "k", "g"))
    gates = [gates_of(products, tile) for tile in g]
    zeros = jnp.zeros_like(k[0])
    d_k, d_g = [zeros] * len(k), [zeros] * len(k)
    # Of what each tile's `since` and `until` are factors of.
    of_since, of_until = [zeros] * len(k), [zeros] * len(k)
    for b in range(len(k)):
        later, kept = q[b] * gates[b].since, jnp.ones_like(gates[b].total)
        read = zeros
        for a in range(b - 1, -1, -1):
            square, fade = x["a"][_tokens(b), _tokens(a)], gates[a].until * kept[None, :]
            earlier = k[a] * fade
            here, written = products.dot(square, earlier), products.dot(square, later, left=True)
            read = read + here
            d_k[a] = d_k[a] + written * fade
            of_until[a] = of_until[a] + written * earlier
            crossing = jnp.sum(here * later, axis=0)[None, :]
            for between in range(a + 1, b):
                d_g[between] = d_g[between] + crossing
            kept = kept * gates[a].total
        of_since[b] = read * later
        square = x["a"][_tokens(b), _tokens(b)]
        within = gradients_within(products, square, q[b], k[b], g[b])
        out["d_q"][_tokens(b), :] = within[0] + read * gates[b].since
        d_k[b], d_g[b] = d_k[b] + within[1], d_g[b] + within[2]
    for b in range(len(k)):
        out["d_k"][_tokens(b), :] = d_k[b]
        out["d_g"][_tokens(b), :] = d_g[b] + d_gates_of(products, of_since[b], of_until[b])


def scores_of_channels(plan: Plan, x: Rows) -> Any:
    """dF/dA (m, r, T, C), of q, k and g."""
    m, r, tokens, d = x["q"].shape
    grid = Grid(plan.chunk, tokens // plan.chunk, m * r)
    found = plan.launch(
        channel_scores,
        "channel_scores",
        grid.shape,
        {"q": grid.rows(each_query(x["q"])), "k": grid.rows(x["k"]), "g": grid.rows(x["g"])},
        {"scores": grid.rows(empty(m * r, tokens, plan.chunk))},
        block=plan.block("channel_scores", d),
    )
    return found["scores"].reshape(m, r, tokens, plan.chunk)


def read_of_channels(plan: Plan, x: Rows, a: Any) -> Any:
    """dF/dq (m, r, T, d), of A (m, r, T, C), k and g."""
    (m, r, tokens, _), d = a.shape, x["k"].shape[2]
    width = plan.block("channel_read", d)
    grid = Grid(plan.chunk, tokens // plan.chunk, m * r, d // width)
    found = plan.launch(
        channel_read,
        "channel_read",
        grid.shape,
        {
            "a": grid.rows(each_query(a)),
            "k": grid.rows(x["k"], width),
            "g": grid.rows(x["g"], width),
        },
        {"d_q": grid.rows(empty(m * r, tokens, d), width)},
    )
    return found["d_q"].reshape(m, r, tokens, d)


def gradients_of_channels(plan: Plan, x: Rows, a: Any) -> tuple[Any, Any, Any]:
    """dF/dq (m, r, T, d), dF/dk and dF/dg (m, T, d), of A (m, r, T, C), q, k and g."""
    m, r, tokens, d = x["q"].shape
    width = plan.block("channel_gradient", d)
    grid = Grid(plan.chunk, tokens // plan.chunk, m * r, d // width)
    found = plan.launch(
        channel_gradient,
        "channel_gradient",
        grid.shape,
        {
            "a": grid.rows(each_query(a)),
            "q": grid.rows(each_query(x["q"]), width),
            "k": grid.rows(x["k"], width),
            "g": grid.rows(x["g"], width),
        },
        {name: grid.rows(empty(m * r, tokens, d), width) for name in ("d_q", "d_k", "d_g")},
    )
    d_q, d_k, d_g = (found[name].reshape(m, r, tokens, d) for name in ("d_q", "d_k", "d_g"))
    return d_q, jnp.sum(d_k, axis=1), jnp.sum(d_g, axis=1)
