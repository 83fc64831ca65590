"""Products as tensor cores compute them: rounded factors, sums in float32.

    Z = r(X) r(Y),    dX = r(dZ) r(Y)ᵀ,    dY = r(X)ᵀ r(dZ)

r rounds to the dtype of the call or, if a kernel's factors are in float32, to tf32: tensor cores
read the first 10 bits of a float32's fraction.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Rounding = Callable[[Tensor], Tensor]

TF32_BITS = torch.tensor(0xFFFFE000 - 2**32, dtype=torch.int32)


def to_dtype(dtype: torch.dtype) -> Rounding:
    """Rounding to the nearest number of a dtype; the result is in float32."""
    return lambda x: x.to(dtype).float()


def tf32(x: Tensor) -> Tensor:
    """A float32 array as tensor cores read it."""
    return (x.contiguous().view(torch.int32) & TF32_BITS).view(torch.float32)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, rounding):
        x, y = rounding(x), rounding(y)
        ctx.save_for_backward(x, y)
        ctx.rounding = rounding
        return x @ y

    @staticmethod
    def backward(ctx, d_z):
        x, y = ctx.saved_tensors
        d_z = ctx.rounding(d_z)
        return d_z @ y.mT, x.mT @ d_z, None


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rounding):
        ctx.rounding = rounding
        return rounding(x)

    @staticmethod
    def backward(ctx, d_x):
        return ctx.rounding(d_x), None


def product(x: Tensor, y: Tensor, rounding: Rounding) -> Tensor:
    """The product X Y (…, m, n), for leading axes that broadcast."""
    axes = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return _Product.apply(x.expand(*axes, *x.shape[-2:]), y.expand(*axes, *y.shape[-2:]), rounding)


def stored(x: Tensor, rounding: Rounding) -> Tensor:
    """An array that one kernel stores and another loads; its gradient is rounded likewise."""
    return _Rounded.apply(x, rounding)
