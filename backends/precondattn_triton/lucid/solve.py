"""LUCID's solve and its gradient with Triton kernels: the launches, from a user's arrays.

    y = (I + diag(β) stril(Φ))⁻¹ diag(β) v,    Φ_ij = e^{s ⟨k̂_i, k̂_j⟩ − s d}

by blocked substitution over super-blocks of S tokens. Tiles of Φ between super-blocks are
recomputed wherever they are used; Φ of one super-block is stored while it is solved.

The parts are in other files: sizes (`plan.py`), normalised inputs (`prepare.py`), the inverses of
diagonal tiles (`inverse.py`), substitution (`substitution.py`) and the gradient of the keys
(`gradient.py`); in PaTH's metric, the rows that replace keys and their gradient (`borders.py`).
Memory holds, for T tokens of a key/value head, keys and y as operands, and for one super-block of
S tokens its matrix Φ, S² numbers, and sums in float32; no array is T × T.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional

from precondattn.backend import ArraySpec, Request
from precondattn.frame import Frame
from precondattn.kernel_backend.limits import MOST_HEADS
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.metric import DOT
from precondattn_triton.lucid import gradient as lucid_gradient
from precondattn_triton.lucid import inverse as lucid_inverse
from precondattn_triton.lucid import prepare as lucid_prepare
from precondattn_triton.lucid import substitution as lucid_substitution
from precondattn_triton.lucid.borders import LucidBorders, borders_gradient, borders_of
from precondattn_triton.lucid.plan import plan_of
from precondattn_triton.path.chunk_gradient import tokens_of
from precondattn_triton.precision import exact
from precondattn_triton.target import processors
from precondattn_triton.tiles import masks_of


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


class LucidMatrix:
    """The triangular matrix of one call: solves with it, or, backward, with its transpose."""

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
        beta = self.x.get("lucid_beta")
        _, valid, segments = self.masks
        if segments is not None:
            padding = plan.tokens - plan.s
            segments = functional.pad(segments, (0, padding), value=plan.tokens)
        keys = k.new_empty((plan.heads, plan.tokens, plan.key_width), dtype=plan.dtype)
        reciprocal, factor = (
            k.new_empty((plan.heads, plan.tokens), dtype=torch.float32) for _ in range(2)
        )
        rows = plan.inverse.rows
        lucid_prepare.normalize_keys[(plan.tokens // rows, plan.heads)](
            k, beta, valid, keys, reciprocal, factor,
            plan.s, plan.n, plan.tokens, plan.d, self.leaf.eps,
            *k.stride(), *((0, 0, 0) if beta is None else beta.stride()),
            HAS_BETA=beta is not None, HAS_VALID=valid is not None,
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
        lucid_inverse.invert_blocks[(plan.tokens // tile, plan.heads)](
            keys, border_keys, chunk_scores, factor, segments, inverse,
            plan.n, plan.tokens, *plan.score_factors,
            TILE=tile, HALF=half, LEVELS=half.bit_length() - 1, WIDTH=plan.key_width,
            CHUNK=chunk, BORDER_CHUNK=border_chunk, BY_ROW=self.backward,
            HAS_SEGMENTS=segments is not None, PRECISION=plan.precision, EXACT=exact(),
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return inverse

    def solve(self, v: Tensor, out: Tensor, rho: Tensor | None) -> Tensor | None:
        """Write y or dv to `out`; ρ is written to `rho`, or, backward, read for dβ (b, s, n)."""
        plan, (_, _, factor, segments) = self.plan, self.prepared
        backward, inverse, tile = self.backward, self.inverses(), plan.inverse.rows
        rows, columns, warps, stages = plan.update
        keys, chunk_scores, chunk = self.prepared.keys, None, 0
        if self.borders is not None:
            keys, chunk_scores = self.borders.keys, self.borders.chunk_scores
            chunk = self.borders.chunks.size
        size, blocks = plan.super_block, len(plan.super_blocks)
        parts, per_part = self._parts()
        solved = inverse.new_empty((plan.heads, plan.tokens, plan.step))
        matrix = inverse.new_empty((plan.heads, size, size))
        sums = factor.new_empty((parts, plan.heads, size, plan.step))
        sizes = factor.new_empty((plan.heads, blocks, plan.step))
        tile_exponents = factor.new_empty((plan.heads, size // tile, plan.step))
        solvers, d_factor = triton.cdiv(plan.e, plan.solver), None
        if backward and rho is not None:
            d_factor = factor.new_empty((solvers, plan.heads, plan.tokens))
        for start in reversed(plan.super_blocks) if backward else plan.super_blocks:
            end = min(start + size, plan.tokens)
            past = plan.tokens - end if backward else start
            programs = 1 + plan.chunks * triton.cdiv(past, per_part)
            lucid_substitution.update[((end - start) // rows, plan.heads, programs)](
                keys, chunk_scores, segments, solved, sizes, sums, matrix,
                plan.n, plan.tokens, start, past, per_part, self.prepared.keys.numel(),
                *plan.score_factors,
                BACKWARD=backward, HAS_BORDERS=self.borders is not None,
                HAS_SEGMENTS=segments is not None, SCALED=plan.half,
                ROWS=rows, COLUMNS=columns, TILE=tile, SUPER=size, CHUNK=chunk,
                KEY_WIDTH=plan.key_width, WIDTH=plan.chunk, STEP=plan.step,
                PRECISION=plan.precision, num_warps=warps, num_stages=stages,
            )  # fmt: skip
            lucid_substitution.substitute[(solvers, plan.heads)](
                matrix, inverse, factor, segments, v, self.masks.k_valid, sums, solved,
                tile_exponents, sizes, rho, out, d_factor,
                plan.s, plan.n, plan.tokens, start, past, per_part, plan.e,
                *v.stride(), *out.stride(), *((0,) * 4 if rho is None else rho.stride()),
                BACKWARD=backward, HAS_BETA=rho is not None,
                HAS_VALID=self.masks.k_valid is not None, HAS_SEGMENTS=segments is not None,
                SCALED=plan.half, TILE=tile, SUPER=size, WIDTH=plan.solver, STEP=plan.step,
                PRECISION=plan.precision,
                num_warps=plan.inverse.warps, num_stages=plan.inverse.stages,
            )  # fmt: skip
        if d_factor is None:
            return None
        total = d_factor.sum(0).view(plan.b, plan.n, plan.tokens)[:, :, : plan.s]
        return total.transpose(1, 2)

    def _parts(self) -> tuple[int, int]:
        """How many programs share the columns of a tile of rows, and the columns of each."""
        plan, (rows, columns) = self.plan, self.plan.update[:2]
        most = max(plan.super_blocks[-1], columns)
        tiles = plan.super_block // rows * plan.heads * plan.chunks
        wanted = max(processors(self.x["k"]) // tiles, 1)
        per_part = triton.cdiv(most // columns, wanted) * columns
        return triton.cdiv(most, per_part), per_part

    def metric_gradient(self, y: Tensor, d_v: Tensor) -> dict[str, Tensor]:
        """The gradients of the metric's inputs: of the keys, and in PaTH's metric of w and β."""
        if self.borders is None:
            return {"k": self.key_gradient(y, d_v)}
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

    def key_gradient(self, y: Tensor, d_v: Tensor) -> Tensor:
        plan, (keys, reciprocal, _, segments) = self.plan, self.prepared
        d_k = torch.empty_like(self.x["k"], memory_format=torch.contiguous_format)
        rows, columns, warps, stages = plan.gradient
        lucid_gradient.key_gradient[(plan.tokens // rows, plan.heads)](
            keys, reciprocal, segments, y, d_v, d_k,
            plan.s, plan.n, plan.tokens, plan.d, plan.e, *plan.score_factors, plan.scale,
            *y.stride(), *d_v.stride(), *d_k.stride(),
            NORMALIZE=self.leaf.normalize == "keys", HAS_SEGMENTS=segments is not None,
            ROWS=rows, COLUMNS=columns, KEY_WIDTH=plan.key_width, WIDTH=plan.chunk,
            CHUNKS=plan.chunks, PRECISION=plan.precision, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return d_k


class LucidSolveKernels:
    """The leaf `LucidSolve`."""

    def refuses(self, leaf: LucidSolve, request: Request) -> str | None:
        if not leaf.has_unit_diagonal:
            return f"its solve has a unit diagonal, unlike normalize={leaf.normalize!r}"
        if leaf.window is not None:
            return "its solve has no window"
        shapes = dict(request.shapes)
        d, e = shapes["k"][3], shapes["v"][3]
        if d > 256 or e > 512:
            return f"its solve supports d ≤ 256 and e ≤ 512; found d={d}, e={e}"
        if 0 in shapes["v"]:
            return "its solve supports no empty arrays"
        if shapes["k"][0] * shapes["k"][2] > MOST_HEADS:
            return f"its solve supports at most {MOST_HEADS} heads of all sequences together"
        return None

    def forward(
        self, leaf: LucidSolve, x: Mapping[str, Tensor], frame: Frame
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        system = LucidMatrix(leaf, x, frame, backward=False)
        y = torch.empty_like(x["v"], memory_format=torch.contiguous_format)
        rho = torch.empty_like(y) if leaf.beta else None
        system.solve(x["v"], y, rho)
        return y, () if rho is None else (rho,)

    def backward(
        self,
        leaf: LucidSolve,
        x: Mapping[str, Tensor],
        frame: Frame,
        out: Tensor,
        residuals: tuple[Tensor, ...],
        cotangent: Tensor,
    ) -> dict[str, Tensor]:
        system = LucidMatrix(leaf, x, frame, backward=True)
        d_v = torch.empty_like(x["v"], memory_format=torch.contiguous_format)
        (rho,) = residuals or (None,)
        d_beta = system.solve(cotangent, d_v, rho)
        gradients = {"v": d_v, **system.metric_gradient(out, d_v)}
        if d_beta is not None:
            gradients["lucid_beta"] = d_beta.to(x["lucid_beta"].dtype)
        return gradients

    def residual_shapes(
        self, leaf: LucidSolve, inputs: Mapping[str, ArraySpec]
    ) -> tuple[ArraySpec, ...]:
        return (ArraySpec(*inputs["v"]),) if leaf.beta else ()
