"""LUCID's solve and its gradient with Triton kernels: the launches, from a user's arrays.

    y = (I + diag(β) stril(Φ))⁻¹ diag(β) v,    Φ_ij = e^{s ⟨k̂_i, k̂_j⟩ − s d}

by blocked substitution over super-blocks of S tokens. Tiles of Φ between super-blocks are
recomputed wherever they are used; Φ of one super-block is stored while it is solved.

The parts are in other files: sizes (`plan.py`), the inverses of diagonal tiles (`inverse.py`),
substitution (`update.py`, `substitution.py`) and the gradient of the keys (`gradient.py`); in
PaTH's metric, the rows that replace keys and their gradient (`borders.py`). Memory holds, for T
tokens of a key/value head, keys and y as operands, and for one super-block of S tokens its matrix
Φ, S² numbers, and sums in float32; no array is T × T.

First the keys are normalised, and β written beside them (`normalize_keys`):

    k̂ = k / rms(k),    rms(k) = √(mean(k²) + ε),  and 1 for a zero row where ε = 0

Padding becomes 0 without being read, so that it may contain NaN. Grid: one program per tile of
tokens and head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from precondattn.frame import Frame
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.metric import DOT
from precondattn_triton.launching import cdiv, launch
from precondattn_triton.lucid import gradient as lucid_gradient
from precondattn_triton.lucid import inverse as lucid_inverse
from precondattn_triton.lucid import substitution as lucid_substitution
from precondattn_triton.lucid import update as lucid_update
from precondattn_triton.lucid.borders import LucidBorders, borders_gradient, borders_of
from precondattn_triton.lucid.plan import UpdateStep, plan_of, update_steps
from precondattn_triton.path.chunk_gradient import tokens_of
from precondattn_triton.precision import exact
from precondattn_triton.target import processors
from precondattn_triton.tiles import addresses, heads, is_token, masks_of, start_of


@triton.jit
def normalize_keys(
    k, beta, valid, unit, reciprocal, factor, s, heads, tokens, width, eps,
    NORMALIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write k̂ to `unit` (m, T, WIDTH), 1 / rms to `reciprocal` and β or 0 to `factor` (m, T)."""
    head = tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    is_valid = is_token(valid, b, token, s)
    at = addresses(start_of(k, b, n), token, k.token, channel, k.channel)
    mask = is_valid[:, None] & (channel < width)[None, :]
    keys = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    one_by_rms = tl.full((ROWS,), 1.0, tl.float32)
    if NORMALIZE:
        mean_square = tl.sum(keys * keys, axis=1) / width + eps
        one_by_rms = 1.0 / tl.sqrt(tl.where(mean_square > 0, mean_square, 1.0))
    out = head * tokens + token
    keys = (keys * one_by_rms[:, None]).to(unit.dtype.element_ty)
    tl.store(unit + out[:, None] * WIDTH + channel[None, :], keys)
    tl.store(reciprocal + out, one_by_rms)
    weight = tl.where(is_valid, 1.0, 0.0)
    if beta is not None:
        at = start_of(beta, b, n) + token * beta.token
        of_tokens = tl.load(at, mask=is_valid, other=0.0).to(tl.float32)
        weight = tl.where(is_valid, of_tokens, 0.0)
    tl.store(factor + out, weight)


TOKENS_OF_A_PART = 2048
"""Tokens for each program that shares the columns of a tile, from which on `update` sums keys.

Of width 128 in 16 bits, pairs with the T / 2 later tokens of a row save 512 FLOPs each, and a part
writes and reads 2 KB for each row: at half of an H100's rates they take the same time at T = 1,200.
"""


class SolveWorkspace(NamedTuple):
    """The workspace from which the forward and the backward solve start."""

    keys: Tensor
    """k̂ (m, T, key_width)"""
    reciprocal: Tensor
    """1 / rms (m, T)"""
    factor: Tensor
    """β, and 0 for padding and invalid tokens (m, T)"""
    segments: Tensor | None
    """(b, 2, T): where the segment of each token begins and ends (`tiles.py`)"""


class SolveSums(NamedTuple):
    """What a backward solve sums up beside dv; None forward."""

    beta: Tensor | None
    """dβ (b, s, n)"""
    keys: Tensor | None
    """Parts of Σ_b Φ_ab g_ab k̂_b over the tokens b of all later super-blocks (parts, m, T,
    key_width); not written for the last super-block. None if `key_gradient` computes them."""


class LucidMatrix:
    """The triangular matrix of one call: solves with it, or, backward, with its transpose."""

    cached = 0
    """The number of first tokens whose y is known."""

    def __init__(
        self, leaf: LucidSolve, x: Mapping[str, Tensor], frame: Frame, *, backward: bool
    ) -> None:
        self.leaf, self.x, self.backward = leaf, x, backward
        self.plan = plan = plan_of(leaf, x["k"], x["v"])
        self.masks = masks_of(frame.among_keys(plan.s), plan.b)
        self.prepared = self._prepare()
        self.borders: LucidBorders | None = None
        if leaf.metric != DOT:
            self.borders = borders_of(
                plan, self.prepared.keys, x, self.masks, with_inverse=backward
            )

    def _prepare(self) -> SolveWorkspace:
        plan, k = self.plan, self.x["k"]
        beta = heads(self.x["lucid_beta"][..., None]) if self.leaf.beta else None
        _, valid, segments = self.masks
        if segments is not None:
            padding = plan.tokens - plan.s
            segments = functional.pad(segments, (0, padding), value=plan.tokens)
        keys = k.new_empty((plan.heads, plan.tokens, plan.key_width), dtype=plan.dtype)
        reciprocal, factor = (
            k.new_empty((plan.heads, plan.tokens), dtype=torch.float32) for _ in range(2)
        )
        rows = plan.inverse.rows
        launch(
            normalize_keys, (plan.tokens // rows, plan.heads),
            heads(k), beta, valid, keys, reciprocal, factor,
            plan.s, plan.n, plan.tokens, plan.d, self.leaf.eps,
            NORMALIZE=self.leaf.normalize == "keys",
            ROWS=rows, WIDTH=plan.key_width, num_warps=8,
        )  # fmt: skip
        return SolveWorkspace(keys, reciprocal, factor, segments)

    def inverses(self) -> Tensor:
        """The inverses of all tiles on the diagonal (m, T, TILE)."""
        plan, (keys, _, factor, segments) = self.plan, self.prepared
        tile, _, warps, stages = plan.inverse
        half, borders = plan.first_block, self.borders
        inverse = keys.new_empty((plan.heads, plan.tokens, tile))
        border_keys, chunk_scores, chunk, border_chunk = keys, None, 0, 0
        if borders is not None:
            chunk_scores, chunk = borders.chunk_scores, borders.chunks.size
            border_chunk = chunk if chunk >= tile else 0
            if half < tile and border_chunk == 0:
                border_keys = borders.keys[borders.level(half)]
        launch(
            lucid_inverse.invert_blocks, ((plan.tokens - self.cached) // tile, plan.heads),
            keys, border_keys, chunk_scores, factor, segments, inverse,
            plan.n, plan.tokens, self.cached, *plan.score_factors,
            TILE=tile, HALF=half, LEVELS=half.bit_length() - 1, WIDTH=plan.key_width,
            CHUNK=chunk, BORDER_CHUNK=border_chunk, BY_ROW=self.backward,
            PRECISION=plan.precision, EXACT=exact(),
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return inverse

    def solve(
        self, v: Tensor, out: Tensor, rho: Tensor | None, y: Tensor | None = None
    ) -> SolveSums:
        """Write y or dv to `out`; ρ is written to `rho`, or, backward, read for dβ.

        Backward, y (b, s, n, e) gives the sums of `SolveSums.keys`, where they are supported.
        """
        plan, (_, _, factor, segments) = self.plan, self.prepared
        backward, inverse, tile = self.backward, self.inverses(), plan.inverse.rows
        keys, chunk_scores, chunk = self.prepared.keys, None, 0
        if self.borders is not None:
            keys, chunk_scores = self.borders.keys, self.borders.chunk_scores
            chunk = self.borders.chunks.size
        size = plan.super_block
        steps = list(update_steps(plan.tokens, size, backward=backward, cached=self.cached))
        shared = [self._parts(step) for step in steps]
        most = max(parts for parts, _ in shared)
        has_key_sums = y is not None and self._supports_key_sums(most)
        if has_key_sums:
            # A row has as many sums in each launch; `key_gradient` adds them all.
            shared = [self._parts(step, most) for step in steps]
        solved, sizes, ratios = self._operands()
        matrix = inverse.new_empty((plan.heads, size, size))
        sums = factor.new_empty((most, plan.heads, plan.group_rows, plan.step))
        tile_exponents = factor.new_empty((plan.heads, size // tile, plan.step))
        # Sums of keys have products of all channels, for which padding has to be written too.
        solvers = cdiv(plan.step if has_key_sums else plan.e, plan.solver)
        d_factor, key_sums, y_units, scaled_y = None, None, None, None
        if backward and rho is not None:
            d_factor = factor.new_empty((solvers, plan.heads, plan.tokens))
        if has_key_sums:
            key_sums = factor.new_empty((most, plan.heads, plan.tokens, plan.key_width))
            y_units = factor.new_empty((most, plan.heads, plan.group_rows))
            scaled_y = solved.new_empty((most, plan.heads, plan.group_rows, plan.step))
        rows, columns, warps, stages = plan.update if key_sums is None else plan.joint
        parts_of_group, rho_heads = 0, None if rho is None else heads(rho)
        for step, (parts, per_part) in zip(steps, shared, strict=True):
            parts_before = 0 if step.is_first else parts_of_group
            if step.is_first:
                parts_of_group = parts
            launch(
                lucid_update.update,
                (len(step.rows) // rows, plan.heads, 1 + plan.chunks * parts),
                keys, chunk_scores, segments, solved, sizes, ratios, sums, matrix,
                None if key_sums is None else heads(y), y_units, scaled_y, key_sums, plan.s, plan.e,
                plan.n, plan.tokens, step.start, step.group, step.rows.start,
                step.columns.start, step.columns.stop, per_part, parts_before,
                self.prepared.keys.numel(), *plan.score_factors,
                BACKWARD=backward, HAS_BORDERS=self.borders is not None, SCALED=plan.half,
                ROWS=rows, COLUMNS=columns, TILE=tile, SUPER=size, GROUP_ROWS=plan.group_rows,
                CHUNK=chunk, KEY_WIDTH=plan.key_width, WIDTH=plan.chunk, STEP=plan.step,
                PRECISION=plan.precision, num_warps=warps, num_stages=stages,
            )  # fmt: skip
            launch(
                lucid_substitution.substitute, (solvers, plan.heads),
                matrix, inverse, factor, segments, heads(v), self.masks.k_valid, sums, solved,
                tile_exponents, sizes, ratios, rho_heads, heads(out), d_factor,
                plan.s, plan.n, plan.tokens, step.start, step.group, max(parts, parts_before),
                self.cached, plan.e, BACKWARD=backward, SCALED=plan.half,
                TILE=tile, SUPER=size, GROUP_ROWS=plan.group_rows, WIDTH=plan.solver,
                STEP=plan.step, PRECISION=plan.precision,
                num_warps=plan.inverse.warps, num_stages=plan.inverse.stages,
            )  # fmt: skip
        if d_factor is None:
            return SolveSums(None, key_sums)
        total = d_factor.sum(0).view(plan.b, plan.n, plan.tokens)[:, :, : plan.s]
        return SolveSums(total.transpose(1, 2), key_sums)

    def _operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """The arrays `solved`, `sizes` and `ratios` of `substitute`."""
        plan, keys = self.plan, self.prepared.keys
        solved = keys.new_empty((plan.heads, plan.tokens, plan.step))
        blocks = plan.heads, len(plan.super_blocks), plan.step
        sizes, ratios = (keys.new_empty(blocks, dtype=torch.float32) for _ in range(2))
        return solved, sizes, ratios

    def _supports_key_sums(self, parts: int) -> bool:
        """Whether `update` computes key sums, if `parts` programs share the columns of a tile."""
        plan = self.plan
        has_wide_keys = plan.key_width > 128
        declined = {
            "no super-block is later": len(plan.super_blocks) == 1,
            "a row in PaTH's metric has another key, and so other sums, at each border": (
                self.borders is not None
            ),
            "g is a product of all channels, of which each program has a part": plan.chunks > 1,
            "storing the sums of each part takes longer than products of so few pairs": (
                parts > 1 and plan.tokens < TOKENS_OF_A_PART * parts
            ),
            "spills 72 to 148 bytes in tiles of 16": has_wide_keys and not plan.half,
            "spills 28 bytes on compute capability 9.0": (
                has_wide_keys and self.prepared.segments is not None
            ),
        }
        return not any(declined.values())

    def _parts(self, step: UpdateStep, wanted: int | None = None) -> tuple[int, int]:
        """How many programs share the columns of a tile of rows, and the columns of each.

        `wanted` programs, the last perhaps without columns, or as many as the GPU has room for.
        """
        plan = self.plan
        rows, columns = (plan.update if wanted is None else plan.joint)[:2]
        if len(step.columns) == 0:
            return 0, columns
        tiles = len(step.rows) // rows * plan.heads * plan.chunks
        shared_by = wanted or max(processors(self.x["k"]) // tiles, 1)
        per_part = cdiv(cdiv(len(step.columns), columns), shared_by) * columns
        return wanted or cdiv(len(step.columns), per_part), per_part

    def metric_gradient(self, y: Tensor, d_v: Tensor, key_sums: Tensor | None) -> dict[str, Tensor]:
        """The gradients of the metric's inputs: of the keys, and in PaTH's metric of w and β."""
        if self.borders is None:
            return {"k": self.key_gradient(y, d_v, key_sums)}
        plan, prepared = self.plan, self.prepared
        d = borders_gradient(
            plan, self.borders, prepared.keys, self.masks, prepared.segments, y, d_v
        )
        d_k = d.unit
        if self.leaf.normalize == "keys":
            unit = prepared.keys.float()
            along = (unit * d_k).sum(-1, keepdim=True) / plan.d
            d_k = (d_k - unit * along) * prepared.reciprocal[..., None]
        return {
            name: tokens_of(rows, self.x[name])
            for name, rows in (("k", d_k), ("w", d.w), ("beta", d.path_beta))
        }

    def key_gradient(self, y: Tensor, d_v: Tensor, key_sums: Tensor | None) -> Tensor:
        plan, (keys, reciprocal, _, segments) = self.plan, self.prepared
        d_k = torch.empty_like(self.x["k"], memory_format=torch.contiguous_format)
        rows, columns, warps, stages = plan.gradient
        launch(
            lucid_gradient.key_gradient, (plan.tokens // rows, plan.heads),
            keys, reciprocal, segments, heads(y), heads(d_v), key_sums, d_k,
            0 if key_sums is None else key_sums.shape[0],
            plan.s, plan.n, plan.tokens, plan.d, plan.e, *plan.score_factors, plan.scale,
            NORMALIZE=self.leaf.normalize == "keys",
            SUPER=plan.super_block if key_sums is not None else 0,
            ROWS=rows, COLUMNS=columns, KEY_WIDTH=plan.key_width, WIDTH=plan.chunk,
            CHUNKS=plan.chunks, PRECISION=plan.precision, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return d_k
