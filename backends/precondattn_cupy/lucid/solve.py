"""LUCID's solve and its gradient by CUDA kernels: the launches, from a user's arrays.

    y = (I + diag(β) stril(Φ))⁻¹ diag(β) v,    Φ_ij = e^{s ⟨k̂_i, k̂_j⟩ − s d}

by blocked forward substitution over super-blocks of S tokens. Tiles of Φ are recomputed wherever
they are used, forward and backward.

The kernels are in the files of `cuda/`: preparation (`lucid_prepare.cu`), the inverses of
diagonal super-blocks (`lucid_inverse.cu`), substitution (`lucid_substitution.cu`), and the gradient
of the keys (`lucid_gradient.cu`). For T tokens of a key/value head, memory holds keys and y as
operands, a right side in float32, and S numbers per token for inverses; nothing is T × T.

Half precision is computed in float16, whatever the inputs are: Φ ≤ 1, keys have norm √d, and
float16 has 3 more bits than bfloat16. Keys that are declared as already normalised may not be, and
are computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from precondattn.arrays import Array, Arrays, DType, Residuals, namespace
from precondattn.frame import Frame
from precondattn.kernel_backend.lucid import LucidSolveSupport
from precondattn.spec.lucid import LucidSolve
from precondattn_cupy.configurations import Configuration, configuration, padded_width
from precondattn_cupy.launch import cpp_type, launch
from precondattn_cupy.layout import by_16, empty, in_one_piece, masks_of

LOG2_E = math.log2(math.e)
WIDEST_CHUNK = 128
"""Value channels that a block processes at once."""
WARPS = 4
"""Warps of a block of `lucid_prepare`; each has a token."""


class LucidPlan(NamedTuple):
    """Sizes of one call, and the tiles of its kernels."""

    b: int
    s: int
    n: int
    d: int
    e: int
    tokens: int
    """s, padded to whole tiles of every kernel."""
    super_block: int
    key_width: int
    chunk: int
    chunks: int
    scale: float
    operand: DType
    """Dtype of the factors of products"""
    inverse: Configuration
    update: Configuration
    gradient: Configuration

    @property
    def heads(self) -> int:
        return self.b * self.n

    @property
    def step(self) -> int:
        """Channels of a row of scratch"""
        return self.chunk * self.chunks

    @property
    def score_factors(self) -> tuple[float, float]:
        """s and s d for powers of two"""
        return self.scale * LOG2_E, self.scale * self.d * LOG2_E


def plan_of(leaf: LucidSolve, k: Array, v: Array) -> LucidPlan:
    b, s, n, d = k.shape
    e = v.shape[3]
    half = k.dtype.itemsize == 2 and leaf.normalize == "keys"
    key_width = padded_width(d)
    chunk = min(padded_width(e), WIDEST_CHUNK)
    inverse, update, gradient = (
        configuration(f"lucid_{name}", max(key_width, chunk), half)
        for name in ("inverse", "update", "gradient")
    )
    unit = max(inverse.rows, *update, *gradient)
    tokens = -(-s // unit) * unit
    super_block = max(unit, min(inverse.columns, 1 << (tokens - 1).bit_length()))
    operand = np.dtype(np.float16 if half else np.float32)
    return LucidPlan(
        b, s, n, d, e, tokens, super_block, key_width, chunk, -(-e // chunk), leaf.scale_for(d),
        operand, inverse, update, gradient,
    )  # fmt: skip


class LucidMatrix:
    """The matrix of one call: solves with it and with its transpose."""

    def __init__(
        self, leaf: LucidSolve, x: Mapping[str, Array], frame: Frame, right: Array
    ) -> None:
        k = in_one_piece(x["k"])
        self.plan = plan = plan_of(leaf, k, right)
        self.normalize = leaf.normalize == "keys"
        beta = in_one_piece(x["lucid_beta"]) if leaf.beta else None
        _, self.valid, _, self.segments = masks_of(frame.among_keys(plan.s), plan.b, plan.s)
        self.types = f"{cpp_type(k)}, {'__half' if plan.operand.itemsize == 2 else 'float'}"
        rows = (plan.heads, plan.tokens)
        self.keys = empty(k, (*rows, plan.key_width), plan.operand)
        self.reciprocal, self.factor = (empty(k, rows, np.float32) for _ in range(2))
        self.right = empty(k, (*rows, plan.step), np.float32)
        launch(
            "lucid_prepare",
            f"lucid_prepare<{self.types}, {_text(self.normalize)}>",
            (-(-plan.tokens // WARPS), plan.heads),
            32 * WARPS,
            (
                k, in_one_piece(right), beta, self.valid, self.keys, self.reciprocal, self.factor,
                self.right, plan.s, plan.n, plan.tokens, plan.d, plan.e, plan.key_width, plan.step,
                leaf.eps,
            ),
        )  # fmt: skip

    def inverses(self, *, backward: bool) -> Array:
        """The inverses of all super-blocks (m, T, S)."""
        plan, tile, super_block = self.plan, self.plan.inverse.rows, self.plan.super_block
        operand = self.types.split(", ")[1]
        inverse = empty(self.keys, (plan.heads, plan.tokens, super_block))
        two_tiles = max(
            2 * _bytes(tile, plan.key_width, plan.operand), 2 * _bytes(tile, tile, np.float32)
        )
        launch(
            "lucid_inverse",
            f"lucid_systems<{operand}, {tile}, {plan.key_width}, {_text(backward)}>",
            (plan.tokens // tile * (super_block // tile), plan.heads),
            plan.inverse.threads,
            (
                self.keys, self.factor, self.segments, inverse, plan.s, plan.n, plan.tokens,
                super_block, *plan.score_factors,
            ),
            two_tiles,
        )  # fmt: skip
        half = tile
        while half < min(super_block, plan.tokens):
            launch(
                "lucid_inverse",
                f"lucid_join<{operand}, {tile}>",
                (-(-plan.tokens // (2 * half)) * (half // tile), plan.heads),
                plan.inverse.threads,
                (self.segments, inverse, plan.s, plan.n, plan.tokens, super_block, half),
                _bytes(half + 2 * tile, tile, plan.operand),
            )
            half *= 2
        return inverse

    def solve(self, out: Array, rho: Array | None, *, backward: bool) -> Array | None:
        """Write y or dv to `out` and ρ to `rho`; backward and with a β, return dβ (b, s, n)."""
        plan, tile, operand = self.plan, self.plan.inverse.rows, self.types.split(", ")[1]
        inverse = self.inverses(backward=backward)
        solved = empty(self.right, self.right.shape, plan.operand)
        sizes = empty(self.right, (plan.heads, plan.step))
        d_factor = None
        if backward and rho is not None:
            d_factor = empty(self.right, (plan.chunks, plan.heads, plan.tokens))
        apply_bytes = 4 * plan.chunk + _bytes(tile, tile, plan.operand)
        apply_bytes += _bytes(tile, plan.chunk, plan.operand)
        rows, columns = plan.update
        update_bytes = _bytes(rows + 2 * columns, plan.key_width, plan.operand)
        update_bytes += _bytes(2 * columns, plan.chunk, plan.operand)
        starts = range(0, plan.tokens, plan.super_block)
        for start in reversed(starts) if backward else starts:
            end = min(start + plan.super_block, plan.tokens)
            launch(
                "lucid_substitution",
                f"lucid_apply<{self.types}, {tile}, {plan.chunk}, {_text(backward)}>",
                ((end - start) // tile, plan.heads, plan.chunks),
                plan.inverse.threads,
                (
                    inverse, self.factor, self.segments, self.valid, self.right, solved, sizes,
                    rho, out, d_factor, plan.s, plan.n, plan.tokens, plan.super_block, start,
                    plan.e, plan.step,
                ),
                apply_bytes,
            )  # fmt: skip
            low, high = (0, start) if backward else (end, plan.tokens)
            if low == high:
                continue
            launch(
                "lucid_substitution",
                f"lucid_update<{operand}, {rows}, {columns}, {plan.key_width}, {plan.chunk}>",
                ((high - low) // rows, plan.heads, plan.chunks),
                plan.update.threads,
                (
                    self.keys, self.segments, solved, sizes, self.right, plan.s, plan.n,
                    plan.tokens, plan.super_block, start, low, plan.step, *plan.score_factors,
                ),
                update_bytes,
            )  # fmt: skip
        if d_factor is None:
            return None
        xp = namespace(d_factor)
        total = xp.reshape(xp.sum(d_factor, axis=0), (plan.b, plan.n, plan.tokens))
        return xp.permute_dims(total[:, :, : plan.s], (0, 2, 1))

    def key_gradient(self, y: Array, d_v: Array, d_k: Array) -> None:
        plan = self.plan
        rows, columns = plan.gradient
        shared_bytes = _bytes(rows + columns, plan.key_width, plan.operand)
        shared_bytes += _bytes(rows + columns, plan.chunk, y.dtype)
        shared_bytes += _bytes(rows, columns, plan.operand)
        normalize = _text(self.normalize)
        launch(
            "lucid_gradient",
            f"lucid_key_gradient<{self.types}, {rows}, {columns}, {plan.key_width}, {plan.chunk}, "
            f"{normalize}>",
            (plan.tokens // rows, plan.heads),
            plan.gradient.threads,
            (
                self.keys, self.reciprocal, self.segments, self.valid, y, d_v, d_k, plan.s, plan.n,
                plan.tokens, plan.d, plan.e, *plan.score_factors, plan.scale, np.bool_(by_16(y)),
            ),
            shared_bytes,
        )  # fmt: skip


def _bytes(rows: int, width: int, dtype: DType) -> int:
    """Bytes of a tile in shared memory, whose rows are padded by 16 bytes."""
    return rows * (width * int(np.dtype(dtype).itemsize) + 16)


def _text(flag: bool) -> str:
    return str(flag).lower()


class LucidSolveKernels(LucidSolveSupport):
    """Algorithm of the leaf `LucidSolve`."""

    def forward(
        self, leaf: LucidSolve, x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        system = LucidMatrix(leaf, x, frame, x["v"])
        y = empty(x["v"], x["v"].shape)
        rho = empty(y, y.shape) if leaf.beta else None
        system.solve(y, rho, backward=False)
        return y, () if rho is None else (rho,)

    def backward(
        self,
        leaf: LucidSolve,
        x: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        system = LucidMatrix(leaf, x, frame, cotangent)
        d_k, d_v = (empty(x[name], x[name].shape) for name in ("k", "v"))
        rho = in_one_piece(residuals[0]) if leaf.beta else None
        d_beta = system.solve(d_v, rho, backward=True)
        system.key_gradient(in_one_piece(out), d_v, d_k)
        result = {"k": d_k, "v": d_v}
        if d_beta is not None:
            result["lucid_beta"] = namespace(d_beta).astype(d_beta, x["lucid_beta"].dtype)
        return result
