"""LUCID's solve on a TPU: one kernel iterates over the blocks of a sequence; Φ is never stored.

Forward, from the first block I to the last, with R = v and N_I = (I + stril(Φ_II) diag(β_I))⁻¹,

    ρ_I = N_I (R_I − Σ_{J<I} Φ_IJ y_J),    y_I = β_I ρ_I;

backward, from the last to the first, with R = dy and N_I = (I + diag(β_I) stril(Φ_II))⁻¹,

    X_I = N_Iᵀ (R_I − Σ_{J>I} Φ_IJ dv_J),    dv_I = β_I X_I,    with

    Φ_ij = e^{s r_i r_j ⟨k_i, k_j⟩ − s d} ≤ 1,    r = 1 / rms(k),

0 where i and j belong to different segments. Keys are passed unnormalised, and are normalised in
the products: for keys in bfloat16 these are exact up to float32's rounding, with a single product
of the TPU's matrix unit. The other data of a block's tokens are the rows of its numbers. The
backward solve differs in the order only, since Φ is symmetric.

The grid is (heads, blocks), with blocks in order. Solved rows are stored in main memory. A program
copies a block of them, with their keys, to VMEM while it computes with the previous one, and copies
its own block out before it ends. VMEM holds two blocks of each array. N_I is computed by recursive
2 × 2 block inversion (`chunk_inverse.py`): for β in [0, 2] and any keys, no entry of it is larger
than 2.

For T tokens of a head T² (d + e) FLOPs, and T² (d + e) / 128 numbers from memory. In a packed call
a block reads those from the first block of its segments only (backward: up to the last).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from precondattn.arrays import Array
from precondattn_pallas.launch import Interpret, References
from precondattn_pallas.lucid.substitution import Solved
from precondattn_pallas.lucid.tiles import Phi, segments_of
from precondattn_pallas.recurrence.chunk_arrays import empty
from precondattn_pallas.recurrence.chunk_inverse import unit_lower_inverse
from precondattn_pallas.tpu.launch import IN_MEMORY, SUBLANES, block, launch, scalars
from precondattn_pallas.tpu.tiles import as_column

BLOCK = 128
"""Tokens of a block."""

FACTOR, RECIPROCAL, SEGMENT = 0, 1, 2
"""Rows of a block's numbers: β or 0, r, and the index of the segment (exact up to 2²⁴)."""


class TpuSolveInputs(NamedTuple):
    """The inputs of a forward or backward solve."""

    keys: Array
    """(m, T, d), in whole blocks"""
    reciprocal: Array
    """1 / rms (b, s, n)"""
    numbers: Array
    """(m, blocks, 8, BLOCK)"""
    reach: Array
    """(2 b blocks,): the blocks of the same segments (`reach_of`); None without segments"""

    @property
    def heads(self) -> int:
        """The number of heads of a sequence"""
        return int(self.reciprocal.shape[2])


def phi_tile(phi: Phi, i: tuple[Array, Array], j: tuple[Array, Array]) -> Array:
    """Φ of two blocks, each of its keys (BLOCK, d) and its numbers (8, BLOCK)."""
    (i_keys, i_numbers), (j_keys, j_numbers) = i, j
    scores = phi.products.dot(i_keys, j_keys, right=True)
    scores = scores * as_column(row(i_numbers, RECIPROCAL)) * row(j_numbers, RECIPROCAL)
    return phi.weights(scores, as_column(row(i_numbers, SEGMENT)) == row(j_numbers, SEGMENT))


def reach_of(ids: Array, tokens: int) -> Array:
    """The first and the last block (b, blocks, 2) that share a segment with each block.

    The ids (b, s) are padded to T tokens. The result is flat, int32; None without segments.
    """
    segments = segments_of(ids, tokens)
    if segments is None:
        return None
    first = segments.begin[:, ::BLOCK] // BLOCK
    last = (segments.end[:, BLOCK - 1 :: BLOCK] - 1) // BLOCK
    return jnp.stack([first, last], axis=2).reshape(-1)


def row(numbers: Array, which: int) -> Array:
    """One row (1, BLOCK) of a block's numbers (8, BLOCK)."""
    return numbers[which : which + 1, :]


COPIED = ("keys", "numbers", "values")
"""The arrays of a solved block that later blocks read."""


def substitute(
    x: References, out: References, scratch: References, *, phi: Phi, backward: bool, heads: int
) -> None:
    """y and ρ of a block, or dv and X; `heads` is the number of heads of a sequence."""
    head, step, last = pl.program_id(0), pl.program_id(1), pl.num_programs(1) - 1
    memory = {"keys": x["all_keys"], "numbers": x["all_numbers"], "values": out["values"]}
    own_tile = x["keys"][...], x["numbers"][...]
    sides, solved = scratch["sides"], scratch["solved"]
    sides[...] = x["right"][...]

    def buffer(turn: Array) -> Array:
        return last - turn if backward else turn

    def copies(turn: Array) -> list[Array]:
        """Copies of the block solved at step `turn`, to one of two buffers."""
        slot = lax.rem(turn, jnp.int32(2))
        rows = pl.ds(pl.multiple_of(buffer(turn) * BLOCK, BLOCK), BLOCK)
        result = []
        for index, name in enumerate(COPIED):
            source = memory[name].at[head, buffer(turn) if name == "numbers" else rows]
            arrived = scratch["arrived"].at[jnp.int32(index), slot]
            result.append(pltpu.make_async_copy(source, scratch[name].at[slot], arrived))
        return result

    start = jnp.int32(0)
    if "reach" in x:
        sequence = lax.div(head, jnp.int32(heads))
        own_reach = 2 * (sequence * (last + 1) + buffer(step))
        start = buffer(x["reach"][own_reach + int(backward)])

    @pl.when(step > start)
    def _() -> None:
        for copy in copies(start):
            copy.start()

    def correct(turn: Array, _: Array) -> Array:
        @pl.when(turn + 1 < step)
        def _() -> None:
            for copy in copies(turn + 1):
                copy.start()

        for copy in copies(turn):
            copy.wait()
        slot = lax.rem(turn, jnp.int32(2))
        other = scratch["keys"][slot], scratch["numbers"][slot]
        weights = phi_tile(phi, own_tile, other)
        sides[...] = sides[...] - phi.products.dot(weights, scratch["values"][slot])
        return jnp.int32(0)

    lax.fori_loop(start, step, correct, jnp.int32(0))

    factor = row(own_tile[1], FACTOR)
    column = as_column(factor)
    system = phi_tile(phi, own_tile, own_tile) * (column if backward else factor)
    inverse = unit_lower_inverse(phi.products, system)
    before = phi.products.dot(inverse, sides[...], left=backward)
    if "before_beta" in out:
        out["before_beta"][...] = before
    solved[...] = column * before
    rows = pl.ds(pl.multiple_of(buffer(step) * BLOCK, BLOCK), BLOCK)
    # After this, the next program may read it.
    pltpu.sync_copy(solved, out["values"].at[head, rows])


def solve(
    phi: Phi,
    x: TpuSolveInputs,
    right: Array,
    *,
    has_beta: bool,
    backward: bool,
    interpret: Interpret,
) -> Solved:
    """The solution of the system or its transpose, with `right` (m, T, e) in float32.

    Without β the two solutions are equal.
    """
    keys, numbers, (m, tokens, d) = x.keys, x.numbers, x.keys.shape
    e, blocks = right.shape[2], tokens // BLOCK

    def buffer(i: Array) -> Array:
        return blocks - 1 - i if backward else i

    def rows(array: Array) -> tuple[Array, Array]:
        return array, block(None, BLOCK, array.shape[2], at=lambda h, i: (h, buffer(i), 0))

    outputs = {"values": (empty(m, tokens, e), IN_MEMORY)}
    if has_beta:
        outputs["before_beta"] = rows(empty(m, tokens, e))
    result = launch(
        substitute,
        (m, blocks),
        {
            "keys": rows(keys),
            "numbers": (
                numbers,
                block(None, None, SUBLANES, BLOCK, at=lambda h, i: (h, buffer(i), 0, 0)),
            ),
            "right": rows(right),
            "all_keys": (keys, IN_MEMORY),
            "all_numbers": (numbers, IN_MEMORY),
            **scalars(reach=x.reach),
        },
        outputs,
        {
            "keys": pltpu.VMEM((2, BLOCK, d), keys.dtype),
            "numbers": pltpu.VMEM((2, SUBLANES, BLOCK), jnp.float32),
            "values": pltpu.VMEM((2, BLOCK, e), jnp.float32),
            "sides": pltpu.VMEM((BLOCK, e), jnp.float32),
            "solved": pltpu.VMEM((BLOCK, e), jnp.float32),
            "arrived": pltpu.SemaphoreType.DMA((len(COPIED), 2)),
        },
        interpret=interpret,
        phi=phi,
        backward=backward,
        heads=x.heads,
    )
    return Solved(result["values"], result.get("before_beta", result["values"]))
