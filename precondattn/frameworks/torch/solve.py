"""Triangular solves and Cholesky factors by PyTorch's ordinary operators, for any number of rows.

Cholesky, column by column: A⁰ = A, l_j = A^j e_j / √A^j_jj below row j, A^{j+1} = A^j − l_j l_jᵀ.
Systems: blocks of C rows are solved one after another in a scan,

    Y_i = D_i⁻¹ (V_i − Σ_{j<i} L_ij Y_j),

where D_i is the diagonal block. Its inverse is assembled from the inverses of its own diagonal
blocks of 1, 2, 4 … rows:

    [P 0; R Q]⁻¹ = [P⁻¹ 0; −Q⁻¹ R P⁻¹ Q⁻¹].

This is as accurate as substitution. The product of I − N, I + N², I + N⁴ …, which also is the
inverse of I + N, is not: for equal keys the powers of N exceed 10¹⁷, while the inverse is at most
1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from precondattn.frameworks.torch.scan import steps

BLOCK = 32
"""The number C of rows of a block, a power of 2."""


def solve_triangular(matrix: Tensor, right: Tensor, *, lower: bool) -> Tensor:
    """The solution matrix⁻¹ right (…, s, e), for stacks (…, s, s) and (…, s, e)."""
    if not lower:
        flipped = solve_triangular(matrix.flip(-1, -2), right.flip(-2), lower=True)
        return flipped.flip(-2)
    batch, (s, e) = right.shape[:-2], right.shape[-2:]
    n = math.prod(batch)  # Not −1, which is unknown for matrices without rows.
    if isinstance(s, int) and s == 1:  # The case of decoding.
        return right / matrix
    # There are at least 2 blocks, so that a graph needs no special case for one block.
    blocks = (s + 2 * BLOCK - 1) // BLOCK
    missing = blocks * BLOCK - s
    matrix = pad(matrix.reshape(n, s, s), (0, missing, 0, missing))
    right = pad(right.reshape(n, s, e), (0, 0, 0, missing))
    row = torch.arange(blocks * BLOCK, device=matrix.device)
    matrix = torch.where((row[:, None] == row) & (row >= s), 1.0, matrix)
    panels = matrix.reshape(n, blocks, BLOCK, blocks * BLOCK).transpose(0, 1)
    on_diagonal = matrix.reshape(n, blocks, BLOCK, blocks, BLOCK).diagonal(dim1=1, dim2=3)
    inverse = _inverse(on_diagonal.movedim(-1, 0))
    block = torch.arange(blocks, device=matrix.device)

    def step(solution: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        panel, inverse, right, is_own = token
        solved = inverse @ (right - panel @ solution)
        is_row = is_own.repeat_interleave(BLOCK)[:, None]
        rows = solved[:, None].expand(-1, is_own.shape[0], -1, -1).reshape(solution.shape)
        return torch.where(is_row, rows, solution), solved

    given = [panels, inverse, right.reshape(n, blocks, BLOCK, e).transpose(0, 1)]
    _, solved = steps(step, torch.zeros_like(right), [*given, block[:, None] == block])
    solved = solved.transpose(0, 1).reshape(n, blocks * BLOCK, e)
    # Not a slice: a graph would need to know that it is within the blocks.
    own = torch.arange(s, device=matrix.device)
    return solved.index_select(1, own).reshape(*batch, s, e)


def cholesky(matrix: Tensor) -> Tensor:
    """The factor L of A = L Lᵀ, for matrices (…, s, s); NaN if A is not positive definite."""

    def step(rest: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        is_own, is_reached = token
        column = torch.where(is_own, rest, 0.0).sum(dim=-1)
        pivot = torch.where(is_own, column, 0.0).sum(dim=-1, keepdim=True)
        column = torch.where(is_reached, column / pivot.sqrt(), 0.0)
        return rest - column[..., :, None] * column[..., None, :], column

    row = torch.arange(matrix.shape[-1], device=matrix.device)
    _, columns = steps(step, matrix, [row[:, None] == row, row[:, None] <= row])
    return columns.movedim(0, -1)


def _inverse(matrix: Tensor) -> Tensor:
    """The inverses of lower-triangular matrices (…, C, C)."""
    *batch, size, _ = matrix.shape
    inverse = 1.0 / matrix.diagonal(dim1=-2, dim2=-1)[..., None, None]  # (…, C, 1, 1)
    rows = 1
    while rows < size:
        parts = matrix.reshape(*batch, size // (2 * rows), 2, rows, size // (2 * rows), 2, rows)
        below = parts[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        off = -second @ below @ first
        top = torch.cat([first, torch.zeros_like(first)], dim=-1)
        inverse = torch.cat([top, torch.cat([off, second], dim=-1)], dim=-2)
        rows *= 2
    return inverse[..., 0, :, :]
