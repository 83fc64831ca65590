"""The gradient of LUCID's keys on a TPU, in one pass over all pairs of blocks.

    dk̂_a = −s Σ_b Φ_ab g_ab r_b k_b,    g_ab = dv_a · y_b  (b before a),  dv_b · y_a  (b after a),

which is propagated through the norm by XLA. The grid is (heads, blocks of a, blocks of b): the
block of a stays in memory and accumulates while the last axis iterates over b. Blocks without a
common segment are not multiplied.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from precondattn.arrays import Array
from precondattn_pallas.launch import Interpret, References
from precondattn_pallas.lucid.tiles import Phi
from precondattn_pallas.recurrence.chunk_arrays import empty
from precondattn_pallas.recurrence.chunk_tiles import tokens_of
from precondattn_pallas.tpu.launch import SUBLANES, block, launch, scalars
from precondattn_pallas.tpu.lucid_substitution import (
    BLOCK,
    RECIPROCAL,
    TpuSolveInputs,
    phi_tile,
    row,
)


def key_gradient(x: References, out: References, _: Array, *, phi: Phi, heads: int) -> None:
    """A block of Σ_b Φ_ab g_ab r_b k_b, one block of b after the other."""
    a, b = pl.program_id(1), pl.program_id(2)
    first, last = jnp.int32(0), pl.num_programs(1) - 1
    if "reach" in x:
        sequence = lax.div(pl.program_id(0), jnp.int32(heads))
        reach_index = 2 * (sequence * pl.num_programs(1) + a)
        first, last = x["reach"][reach_index], x["reach"][reach_index + 1]

    @pl.when(b == 0)
    def _() -> None:
        out["d_keys"][...] = jnp.zeros_like(out["d_keys"])

    dot, (i, j) = phi.products.dot, tokens_of(BLOCK)

    def add(left: str, right: str, seen: Array) -> None:
        keys, numbers = x["b_keys"][...], x["b_numbers"][...]
        weights = phi_tile(phi, (x["a_keys"][...], x["a_numbers"][...]), (keys, numbers))
        g = dot(x[f"a_{left}"][...], x[f"b_{right}"][...], right=True)
        g = g if seen is None else jnp.where(seen, g, jnp.float32(0))
        result = dot(g * weights * row(numbers, RECIPROCAL), keys)
        out["d_keys"][...] = out["d_keys"][...] + result

    @pl.when((first <= b) & (b < a))
    def _() -> None:
        add("d_v", "y", None)

    @pl.when((a < b) & (b <= last))
    def _() -> None:
        add("y", "d_v", None)

    @pl.when(a == b)
    def _() -> None:
        add("d_v", "y", j < i)
        add("y", "d_v", j > i)


def d_keys(phi: Phi, x: TpuSolveInputs, y: Array, d_v: Array, *, interpret: Interpret) -> Array:
    """Σ_b Φ_ab g_ab r_b k_b (m, T, d) in float32, from y and dv (m, T, e)."""
    m, tokens, d = x.keys.shape
    blocks = tokens // BLOCK
    inputs = dict(scalars(reach=x.reach))
    for axis, side in ((1, "a"), (2, "b")):
        for name, array in {"keys": x.keys, "y": y, "d_v": d_v}.items():
            inputs[f"{side}_{name}"] = array, _rows(array.shape[2], axis)
        inputs[f"{side}_numbers"] = x.numbers, _numbers(axis)
    result = launch(
        key_gradient,
        (m, blocks, blocks),
        inputs,
        {"d_keys": (empty(m, tokens, d), _rows(d, 1))},
        interpret=interpret,
        phi=phi,
        heads=x.heads,
    )
    return result["d_keys"]


def _rows(width: int, axis: int) -> pl.BlockSpec:
    """Rows of a block, by an axis of the grid."""
    return block(None, BLOCK, width, at=lambda *program: (program[0], program[axis], 0))


def _numbers(axis: int) -> pl.BlockSpec:
    at = (None, None, SUBLANES, BLOCK)
    return block(*at, at=lambda *program: (program[0], program[axis], 0, 0))
