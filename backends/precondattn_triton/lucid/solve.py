"""LUCID's solve and its gradient with Triton kernels: a user's arrays, and the launches.

The parts are in other files: sizes (`plan.py`), normalised inputs (`prepare.py`), the inverses of
diagonal super-blocks (`inverse.py`), substitution (`substitution.py`) and the gradient of the keys
(`gradient.py`); in PaTH's metric, the rows that replace keys and their gradient (`borders.py`).
Memory holds, for T tokens of a key/value head, keys and y as operands, a right-hand side in
float32, and S numbers per token for inverses; no array is T × T.
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
from precondattn_triton.tiles import masks_of


class RightSides(NamedTuple):
    """What is left of the right-hand sides, as super-blocks are solved."""

    values: Tensor
    """R (m, T, step), float32"""
    largest: Tensor
    """Largest magnitudes of tiles of `update` (m, T / rows, step)"""


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
    """The matrix of one call: solves with it, or, backward, with its transpose."""

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

    def right_sides(self, v: Tensor) -> RightSides:
        plan, valid = self.plan, self.masks.k_valid
        rows = plan.update.rows
        right = v.new_empty((plan.heads, plan.tokens, plan.step), dtype=torch.float32)
        largest = right.new_empty((plan.heads, plan.tokens // rows, plan.step))
        lucid_prepare.load_right_sides[(plan.tokens // rows, plan.heads, plan.chunks)](
            v, valid, right, largest, plan.s, plan.n, plan.tokens, plan.e, *v.stride(),
            HAS_VALID=valid is not None, ROWS=rows, WIDTH=plan.chunk, STEP=plan.step, num_warps=8,
        )  # fmt: skip
        return RightSides(right, largest)

    def _scores(self, half: int) -> tuple[Tensor | None, Tensor | None, int]:
        """For scores of pairs of blocks of `half` tokens: keys, or chunks' scores and size."""
        borders = self.borders
        if borders is None:
            return self.prepared.keys, None, 0
        if half < borders.chunks.size:
            return None, borders.chunk_scores, borders.chunks.size
        return borders.keys[borders.level(half)], None, 0

    def _keys_between_super_blocks(self) -> Tensor:
        """The keys; in PaTH's metric, those at the borders between super-blocks, of all levels."""
        borders = self.borders
        if borders is None:
            return self.prepared.keys
        return borders.keys[borders.level(self.plan.super_block) :]

    def inverses(self) -> Tensor:
        """The inverses of all super-blocks (m, T, S)."""
        plan, (keys, _, factor, segments) = self.plan, self.prepared
        widest, _, warps, stages = plan.inverse
        # Zeros, since tiles on the diagonal are read as a whole but only partly written.
        inverse = keys.new_zeros((plan.heads, plan.tokens, plan.super_block))
        options = {
            "WIDTH": plan.key_width,
            "BY_ROW": self.backward,
            "HAS_SEGMENTS": segments is not None,
            "PRECISION": plan.precision,
            "num_warps": warps,
            "num_stages": stages,
        }
        half = plan.first_block
        keys, chunk_scores, chunk = self._scores(half // 2)
        lucid_inverse.invert_blocks[(plan.tokens // half, plan.heads)](
            keys, chunk_scores, factor, segments, inverse, plan.n, plan.tokens, *plan.score_factors,
            TILE=half, SUPER=plan.super_block, CHUNK=chunk, LEVELS=half.bit_length() - 1,
            EXACT=exact(), **options,
        )  # fmt: skip
        while half < min(plan.super_block, plan.tokens):
            tile = min(half, widest)
            keys, chunk_scores, chunk = self._scores(half)
            pairs, tiles = triton.cdiv(plan.tokens, 2 * half), half // tile
            lucid_inverse.left_factors[(pairs * tiles * tiles, plan.heads)](
                keys, chunk_scores, factor, segments, inverse,
                plan.n, plan.tokens, *plan.score_factors,
                half, TILE=tile, SUPER=plan.super_block, CHUNK=chunk, **options,
            )  # fmt: skip
            lucid_inverse.right_factors[(pairs * tiles, plan.heads)](
                inverse, segments, plan.n, plan.tokens, half, TILE=tile, SUPER=plan.super_block,
                HAS_SEGMENTS=segments is not None, PRECISION=plan.precision,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip
            half *= 2
        return inverse

    def solve(self, sides: RightSides, out: Tensor, rho: Tensor | None) -> Tensor | None:
        """Write y or dv to `out`; ρ is written to `rho`, or, backward, read for dβ (b, s, n)."""
        plan, (_, _, factor, segments) = self.plan, self.prepared
        backward, inverse, (right, largest) = self.backward, self.inverses(), sides
        solved = torch.empty_like(right, dtype=plan.dtype)
        sizes = right.new_empty((plan.heads, plan.step))
        d_factor = None
        if backward and rho is not None:
            d_factor = right.new_empty((plan.chunks, plan.heads, plan.tokens))
        starts = reversed(plan.super_blocks) if backward else plan.super_blocks
        for start in starts:
            end = min(start + plan.super_block, plan.tokens)
            tiles = (end - start) // plan.inverse.rows
            lucid_substitution.apply_inverse[(tiles, plan.heads, plan.chunks)](
                inverse, factor, segments, right, largest, solved, sizes, rho, out, d_factor,
                plan.s, plan.n, plan.tokens, start, plan.e,
                *out.stride(), *((0,) * 4 if rho is None else rho.stride()),
                BACKWARD=backward, HAS_BETA=rho is not None, HAS_SEGMENTS=segments is not None,
                SCALED=plan.half,
                TILE=plan.inverse.rows, ROWS=plan.update.rows, SUPER=plan.super_block,
                WIDTH=plan.chunk, STEP=plan.step, PRECISION=plan.precision,
                num_warps=plan.inverse.warps, num_stages=plan.inverse.stages,
            )  # fmt: skip
            low, high = (0, start) if backward else (end, plan.tokens)
            if low == high:
                continue
            rows, columns, warps, stages = plan.update
            lucid_substitution.update[((high - low) // rows, plan.heads, plan.chunks)](
                self._keys_between_super_blocks(), segments, solved, sizes, right, largest,
                plan.n, plan.tokens, start, low, self.prepared.keys.numel(), *plan.score_factors,
                HAS_BORDERS=self.borders is not None, HAS_SEGMENTS=segments is not None,
                SCALED=plan.half, ROWS=rows, COLUMNS=columns, SUPER=plan.super_block,
                KEY_WIDTH=plan.key_width, WIDTH=plan.chunk, STEP=plan.step,
                PRECISION=plan.precision, num_warps=warps, num_stages=stages,
            )  # fmt: skip
        if d_factor is None:
            return None
        total = d_factor.sum(0).view(plan.b, plan.n, plan.tokens)[:, :, : plan.s]
        return total.transpose(1, 2)

    def metric_gradient(self, y: Tensor, d_v: Tensor) -> dict[str, Tensor]:
        """The gradient of the keys, and in PaTH's metric of its inputs."""
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
        system.solve(system.right_sides(x["v"]), y, rho)
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
        d_beta = system.solve(system.right_sides(cotangent), d_v, rho)
        gradients = {"v": d_v, **system.metric_gradient(out, d_v)}
        if d_beta is not None:
            gradients["lucid_beta"] = d_beta.to(x["lucid_beta"].dtype)
        return gradients

    def residual_shapes(
        self, leaf: LucidSolve, inputs: Mapping[str, ArraySpec]
    ) -> tuple[ArraySpec, ...]:
        return (ArraySpec(*inputs["v"]),) if leaf.beta else ()
