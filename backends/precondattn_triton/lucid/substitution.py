"""Block substitution with LUCID's matrix, one super-block after another.

Forward, for the super-blocks J of S tokens from the first to the last, with R = v, and backward,
from the last to the first, with R = dy, two launches each:

    update        P_J = Σ_I Φ_JI y_I  over the super-blocks I solved before;  Φ_JJ is stored
    substitute    for the tiles i of J, in the order of the solve, with N_i of `inverse.py`,

        ρ_i = N_i (R_i − P_i − Σ_j Φ_ij y_j),    y_i = β_i ρ_i,    over the tiles j of J before i.

Backward, N_iᵀ replaces N_i, X replaces ρ and dv replaces y. Φ is symmetric, so that the same
kernels serve both directions. In PaTH's metric the keys of a tile are the rows at the border
between it and the other tile (`borders.py`), and Φ is symmetric again. `update.py` has the first
kernel.

`substitute` can not divide the rows of a head between programs, since each needs those before it.
Grid: one program per block of channels and head, each for all rows of J. They read the same Φ_JJ,
which is why it is stored: S² numbers per head, used again for every super-block.

In products of 16 bits, every tile of y is divided by a power of two for each channel, so that no
quotient exceeds 2¹⁴ and the largest exceeds 2¹³. When J is solved, all of its tiles are divided by
the largest of these powers instead. `update` takes the super-blocks in the order in which they were
solved, and multiplies its sums by the quotient of two powers between them. So results that are far
smaller than those of other super-blocks keep their digits. A power is at least 2⁻⁶⁰ times those of
super-blocks solved before, so that sums in its units do not overflow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.lucid.tiles import reach
from precondattn_triton.tiles import addresses, is_token, load_rows, start_of

LARGEST = tl.constexpr(14)
"""The exponent that no quotient in 16 bits exceeds; float16 ends before 2¹⁶."""

RANGE = tl.constexpr(60)
"""The most by which exponents of a super-block are below the largest of those solved before."""


@triton.jit
def right_sides(
    v, valid, sums, batch, n, head, heads, i_start, group, parts, first, s, cached, width,
    TILE: tl.constexpr, GROUP_ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """R_i − P_i of a tile of rows; R is 0 for padding and invalid tokens, which may be NaN."""
    token = i_start + tl.arange(0, TILE).to(tl.int64)
    channel = first + tl.arange(0, WIDTH)
    mask = is_token(valid, batch, token, s)[:, None] & (channel < width)[None, :]
    at = addresses(start_of(v, batch, n), token - cached, v.token, channel, v.channel)
    sides = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for part in range(parts):
        sides -= load_rows(
            sums, part * heads + head, GROUP_ROWS, i_start - group, TILE, WIDTH, first, STEP
        )
    return sides


@triton.jit
def exponents(tile):
    """For each channel, the least power of two that no magnitude in the tile exceeds: its log₂."""
    largest = tl.max(tl.abs(tile), axis=0)
    return tl.ceil(tl.log2(tl.minimum(tl.maximum(largest, 1e-30), 1e38)))


@triton.jit
def substitute(
    matrix, inverse, factor, segments, v, valid, sums, solved, tile_exponents, sizes, ratios, rho,
    out, d_factor, s, heads, tokens, start, group, parts, cached, width,
    BACKWARD: tl.constexpr, SCALED: tl.constexpr, TILE: tl.constexpr, SUPER: tl.constexpr,
    GROUP_ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Solve the super-block at `start` for a block of channels.

    v, `out` and `rho` begin at token `cached`.

    y or dv is written to `out` (b, s, n, e), and, divided by powers of two, to `solved`
    (m, T, STEP) as an operand. The powers are written to `sizes` (m, super-blocks, STEP), those of
    the super-block before divided by them to `ratios`, and the exponents of those of tiles to
    `tile_exponents` (m, SUPER / TILE, STEP). With β, ρ is written to `rho` (b, s, n, e) forward.
    Backward it is read, and `d_factor` (blocks of channels, m, T) gets the part of these channels
    in dβ = X · ρ.
    """
    head = tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    first = tl.program_id(0) * WIDTH
    channel = first + tl.arange(0, WIDTH).to(tl.int64)
    end = tl.minimum(start + SUPER, tokens)
    count = (end - start) // TILE
    if segments is not None:
        segments += b * 2 * tokens
    tile_exponents += head * (SUPER // TILE) * STEP + channel
    highest = tl.full((WIDTH,), -120.0, tl.float32)
    largest_before, last_before = highest, highest
    sizes += head * tl.cdiv(tokens, SUPER) * STEP + channel
    if SCALED:
        first_solved, solved_blocks = 0, start // SUPER
        if BACKWARD:
            first_solved = start // SUPER + 1
            solved_blocks = tl.cdiv(tokens, SUPER) - first_solved
        for index in range(solved_blocks):
            # The loop visits super-blocks in the order in which they were solved.
            block = first_solved + (solved_blocks - 1 - index if BACKWARD else index)
            last_before = tl.log2(tl.load(sizes + block * STEP))
            largest_before = tl.maximum(largest_before, last_before)
    for index in range(count):
        i_start = start + index * TILE
        low, high = start, i_start
        if BACKWARD:
            i_start = end - (index + 1) * TILE
            low, high = i_start + TILE, end
        if segments is not None:
            begin_of_rows, end_of_rows = reach(segments, tokens, i_start, TILE)
            low = tl.maximum(low, begin_of_rows // TILE * TILE)
            high = tl.minimum(high, end_of_rows)
        total = tl.zeros((TILE, WIDTH), tl.float32)
        for j_start in range(low, high, TILE):
            column = tl.multiple_of(j_start - start, TILE)
            phi_tile = load_rows(matrix, head, SUPER, i_start - start, TILE, TILE, column, SUPER)
            values = load_rows(solved, head, tokens, j_start, TILE, WIDTH, first, STEP)
            if SCALED:
                power = tl.exp2(tl.load(tile_exponents + (j_start - start) // TILE * STEP))
                total += tl.dot(phi_tile, values) * power[None, :]
            else:
                total += tl.dot(phi_tile, values, input_precision=PRECISION)
        sides = right_sides(
            v, valid, sums, b, n, head, tl.num_programs(1), i_start, group,
            parts, first, s, cached, width, TILE, GROUP_ROWS, WIDTH, STEP,
        )  # fmt: skip
        sides -= total
        block = load_rows(inverse, head, tokens, i_start, TILE, TILE, 0, TILE)
        if BACKWARD:
            block = tl.trans(block)
        if SCALED:
            exponent = exponents(sides) - LARGEST
            operand = (sides * tl.exp2(-exponent)[None, :]).to(block.dtype)
            solution = tl.dot(block, operand) * tl.exp2(exponent)[None, :]
        else:
            solution = tl.dot(block, sides, input_precision=PRECISION)
        token = i_start + tl.arange(0, TILE).to(tl.int64)
        row = head * tokens + token
        result = solution * tl.load(factor + row)[:, None]
        at = solved + row[:, None] * STEP + channel[None, :]
        if SCALED:
            exponent = exponents(result) - LARGEST
            highest = tl.maximum(highest, exponent)
            tl.store(tile_exponents + (i_start - start) // TILE * STEP, exponent)
            tl.store(at, (result * tl.exp2(-exponent)[None, :]).to(solved.dtype.element_ty))
        else:
            tl.store(at, result)
        inside = (token < s)[:, None] & (channel < width)[None, :]
        at = addresses(start_of(out, b, n), token - cached, out.token, channel, out.channel)
        tl.store(at, result.to(out.array.dtype.element_ty), mask=inside)
        if rho is not None:
            at = addresses(start_of(rho, b, n), token - cached, rho.token, channel, rho.channel)
            if BACKWARD:
                rho_tile = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                part = d_factor + (tl.program_id(0) * tl.num_programs(1) + head) * tokens
                tl.store(part + token, tl.sum(solution * rho_tile, axis=1))
            else:
                tl.store(at, solution.to(rho.array.dtype.element_ty), mask=inside)
        # The next tiles read what other threads have stored.
        tl.debug_barrier()

    if SCALED:
        highest = tl.maximum(highest, largest_before - RANGE)
        block = start // SUPER * STEP
        tl.store(sizes + block, tl.exp2(highest))
        ratios += head * tl.cdiv(tokens, SUPER) * STEP + channel
        tl.store(ratios + block, tl.exp2(last_before - highest))
        for index in range(count):
            row = head * tokens + start + index * TILE + tl.arange(0, TILE)
            at = solved + row[:, None] * STEP + channel[None, :]
            less = tl.exp2(tl.load(tile_exponents + index * STEP) - highest)
            values = tl.load(at).to(tl.float32) * less[None, :]
            tl.store(at, values.to(solved.dtype.element_ty))
