"""Products and exponentials in PyTorch, written to preallocated memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from precondattn.arrays import Index
from precondattn_portable.arithmetic import Arithmetic, FlatScratch, Scratch

LOG2_E = math.log2(math.e)
MANY = 2**14
"""Numbers from which a second pass costs less than it saves."""


class TorchArithmetic(Arithmetic):
    """Stacks of matrices are passed to `bmm`, without a copy wherever their strides allow it."""

    writes = True

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return like.new_empty(shape)

    def zeros(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return like.new_zeros(shape)

    def scratch(self, size: int, like: Tensor) -> Scratch:
        return FlatScratch(self, size, like)

    def heads_first(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous()

    def product(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None and _is_stack(a) and _is_stack(b):
            return torch.matmul(a, b)
        if a.shape[:-2] != b.shape[:-2]:
            return torch.matmul(a, b)
        if out is None:
            out = a.new_empty((*a.shape[:-1], b.shape[-1]))
        stacks = stacked(a), stacked(b), stacked(out)
        if any(stack is None for stack in stacks):
            for part in zip(a, b, out, strict=True):
                self.product(*part)
            return out
        torch.bmm(stacks[0], stacks[1], out=stacks[2])
        return out

    def add_product(self, total: Tensor, a: Tensor, b: Tensor, factor: float = 1.0) -> Tensor:
        if not total.shape[:-2] == a.shape[:-2] == b.shape[:-2]:
            return total.add_(torch.matmul(a, b), alpha=factor)
        stacks = stacked(total), stacked(a), stacked(b)
        if stacks[0] is None or stacks[1] is None or stacks[2] is None:
            for part in zip(total, a, b, strict=True):
                self.add_product(*part, factor)
            return total
        stacks[0].baddbmm_(stacks[1], stacks[2], alpha=factor)
        return total

    def add_product_at(
        self, total: Tensor, where: Index, a: Tensor, b: Tensor, factor: float = 1.0
    ) -> None:
        self.add_product(total[where], a, b, factor)

    def exp(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or not x.is_cpu or x.numel() < MANY:
            return x.exp_()
        return x.mul_(LOG2_E).exp2_()  # In half the time of PyTorch's exp.

    def log(self, x: Tensor) -> Tensor:
        return x.log_()

    def softsign_power(self, base: float, x: Tensor, workspace: Tensor) -> Tensor:
        if base == 1:
            return x.fill_(1.0)
        factor = 1 / math.log2(base)
        offset = torch.full((), factor, dtype=x.dtype, device=x.device)
        magnitude = torch.abs(x, out=workspace)
        # The exponent of 2 is x over (1 + |x|) / log₂ base, which is one pass.
        return x.div_(torch.add(offset, magnitude, alpha=factor, out=workspace)).exp2_()

    def tanh(self, x: Tensor) -> Tensor:
        return x.tanh_()

    def add(self, x: Tensor, y: Tensor | float) -> Tensor:
        return x.add_(y)

    def add_multiple(self, total: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return total.addcmul_(x, y)

    def plus_product(self, total: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.addcmul(total, x, y)

    def multiply(self, x: Tensor, y: Tensor | float) -> Tensor:
        return x.mul_(y)

    def multiplied(self, x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mul(x, y, out=out)

    def subtract(self, x: Tensor, y: Tensor | float) -> Tensor:
        return x.sub_(y)

    def divide(self, x: Tensor, y: Tensor) -> Tensor:
        return x.div_(y)

    def unit_rows(self, x: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float32 or not x.is_cpu or not eps:
            return super().unit_rows(x, eps)
        # In float64, no square of a float32 overflows or underflows: no row has to be scaled first.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
        return torch.mul(x, norm.mul_(norm).add_(eps).rsqrt_(), out=torch.empty_like(x))

    def channel_lengths(self, x: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float32 or not x.is_cpu or not eps:
            return super().channel_lengths(x, eps)
        # In float64, no square of a float32 overflows or underflows.
        norm = torch.linalg.vector_norm(x, dim=2, keepdim=True, dtype=torch.float64)
        return norm.mul_(norm).add_(eps).sqrt_().to(x.dtype)

    def softmax(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    def softmax_vjp(self, weights: Tensor, d_weights: Tensor) -> Tensor:
        return torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)

    def keep(self, x: Tensor, where: Tensor, otherwise: float) -> Tensor:
        return x.masked_fill_(~where, otherwise)

    def solve_unit_lower(
        self, strict: Tensor, right: Tensor, *, transposed: bool = False
    ) -> Tensor:
        matrix = strict.mT if transposed else strict
        return torch.linalg.solve_triangular(matrix, right, upper=transposed, unitriangular=True)

    def running_sum(self, x: Tensor, axis: int) -> Tensor:
        return x.cumsum(axis)

    def accumulate(self, x: Tensor, axis: int) -> Tensor:
        return x.cumsum_(axis)

    def lower(self, x: Tensor, k: int = 0) -> Tensor:
        return x.tril_(k)


def _is_stack(x: Tensor) -> bool:
    """Whether the matrices of (b, n, …) have a constant stride, which `matmul` needs too."""
    is_stack: bool = x.dim() == 4 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return is_stack


def stacked(x: Tensor) -> Tensor | None:
    """(…, m, n) as one stack (-1, m, n) of the same memory; None where strides forbid it."""
    if x.dim() == 3:
        return x
    if x.dim() == 2:
        return x[None]
    try:
        return x.view(-1, *x.shape[-2:])
    except (RuntimeError, ValueError):  # A ValueError while it is traced.
        return None


TORCH = TorchArithmetic()
