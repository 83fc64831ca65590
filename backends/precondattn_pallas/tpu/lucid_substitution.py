"""LUCID's solve on a TPU: one kernel iterates over the blocks of a sequence; Φ is never stored.

Forward, from the first block I to the last, with R = v and N_I = (I + stril(Φ_II) diag(β_I))⁻¹,

    ρ_I = N_I (R_I − Σ_{J<I} Φ_IJ y_J),    y_I = β_I ρ_I;

backward, from the last to the first, with R = dy and N_I = (I + diag(β_I) stril(Φ_II))⁻¹,

    X_I = N_Iᵀ (R_I − Σ_{J>I} Φ_IJ dv_J),    dv_I = β_I X_I,

the same except for the order, since Φ is symmetric. The grid is (heads, blocks), with blocks in
order. Solved rows are stored in main memory. A program copies a block of them, with their keys, to
VMEM while it computes with the previous one, and copies its own block out before it ends. VMEM
holds two blocks of each array. N_I is computed by recursive 2 × 2 block inversion
(`chunk_inverse.py`): for β in [0, 2] and any keys, no entry of it is larger than 2.

For T tokens of a head T² (d + e) FLOPs, and T² (d + e) / 128 numbers from memory. In a packed call
a block reads those from the first block of its segments only (backward: up to the last).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from precondattn.arrays import Array
from precondattn_pallas.launch import Interpret, References
from precondattn_pallas.lucid.substitution import Solved
from precondattn_pallas.lucid.tiles import Phi
from precondattn_pallas.recurrence.chunk_arrays import empty
from precondattn_pallas.recurrence.chunk_inverse import unit_lower_inverse
from precondattn_pallas.tpu.launch import IN_MEMORY, SUBLANES, block, launch, scalars
from precondattn_pallas.tpu.lucid_tiles import BLOCK, FACTOR, phi_tile, row
from precondattn_pallas.tpu.tiles import as_column

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
    keys: Array,
    numbers: Array,
    reach: Array,
    right: Array,
    *,
    heads: int,
    has_beta: bool,
    backward: bool,
    interpret: Interpret,
) -> Solved:
    """The solution of the system or its transpose, with `right` (m, T, e) in float32.

    keys (m, T, d), numbers (m, blocks, 8, BLOCK), reach (2 b blocks,) or None. Without β the two
    solutions are equal.
    """
    m, tokens, d = keys.shape
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
            **scalars(reach=reach),
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
        heads=heads,
    )
    return Solved(result["values"], result.get("before_beta", result["values"]))
