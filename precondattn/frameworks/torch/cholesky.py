"""The Cholesky factor by PyTorch's ordinary operators, column by column in a scan.

A⁰ = A,    l_j = A^j e_j / √A^j_jj, below row j,    A^{j+1} = A^j − l_j l_jᵀ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from precondattn.frameworks.torch.scan import steps


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
