"""The solve of triangular systems by PyTorch's products, for any number of rows.

ONNX has no solver. Blocks of C rows are solved one after the other, in a scan:

    Y_i = D_i⁻¹ (V_i − Σ_{j<i} L_ij Y_j),

where D_i is the block on the diagonal. Its inverse is put together from those of its own blocks on
the diagonal, of 1, 2, 4 … rows:

    [P 0; R Q]⁻¹ = [P⁻¹ 0; −Q⁻¹ R P⁻¹ Q⁻¹].

It is as exact as substitution. The product of I − N, I + N², I + N⁴ …, which is the inverse of
I + N too, is not: for equal keys the powers of N exceed 10¹⁷, and the inverse is at most 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from precondattn.native.torch_scan import steps

BLOCK = 32
"""C, a power of 2."""


def solve_triangular(matrix: Tensor, right: Tensor, *, lower: bool) -> Tensor:
    """matrix⁻¹ right, of stacks (…, s, s) and (…, s, e)."""
    if not lower:
        flipped = solve_triangular(matrix.flip(-1, -2), right.flip(-2), lower=True)
        return flipped.flip(-2)
    batch, (s, e) = right.shape[:-2], right.shape[-2:]
    if isinstance(s, int) and s == 1:  # As in a step of decoding.
        return right / matrix
    # At least 2: a graph for any number of rows has no special case for one block.
    blocks = (s + 2 * BLOCK - 1) // BLOCK
    missing = blocks * BLOCK - s
    matrix = pad(matrix.reshape(-1, s, s), (0, missing, 0, missing))
    right = pad(right.reshape(-1, s, e), (0, 0, 0, missing))
    row = torch.arange(blocks * BLOCK, device=matrix.device)
    matrix = torch.where((row[:, None] == row) & (row >= s), 1.0, matrix)
    panels = matrix.reshape(-1, blocks, BLOCK, blocks * BLOCK).transpose(0, 1)
    on_diagonal = matrix.reshape(-1, blocks, BLOCK, blocks, BLOCK).diagonal(dim1=1, dim2=3)
    inverse = _inverse(on_diagonal.movedim(-1, 0))
    block = torch.arange(blocks, device=matrix.device)

    def step(known: Tensor, given: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        panel, inverse, right, is_own = given
        solved = inverse @ (right - panel @ known)
        is_row = is_own.repeat_interleave(BLOCK)[:, None]
        rows = solved[:, None].expand(-1, is_own.shape[0], -1, -1).reshape(known.shape)
        return torch.where(is_row, rows, known), solved

    given = [panels, inverse, right.reshape(-1, blocks, BLOCK, e).transpose(0, 1)]
    _, solved = steps(step, torch.zeros_like(right), [*given, block[:, None] == block])
    solved = solved.transpose(0, 1).reshape(-1, blocks * BLOCK, e)
    # Not a slice, of which a graph would have to know that it is within the blocks.
    own = torch.arange(s, device=matrix.device)
    return solved.index_select(1, own).reshape(*batch, s, e)


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
