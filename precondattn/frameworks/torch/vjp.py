"""PyTorch: gradients of functions by autograd, or by `torch.func` if a transform is active."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress

import torch
from torch import Tensor

from precondattn.arrays import cast, transforms_of, wants_gradient

Function = Callable[..., tuple[Tensor, ...]]


def vjp(
    function: Function, arrays: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients of the arrays, from the cotangents of all results of `function(*arrays)`."""
    if transforms_of(*arrays, *cotangents):
        results, pullback = torch.func.vjp(function, *arrays)
    else:
        results, pullback = _recorded(function, arrays, wants_gradient(*arrays, *cotangents))
    in_their_dtypes = zip(cotangents, results, strict=True)
    gradients: tuple[Tensor, ...] = pullback(tuple(cast(d, r.dtype) for d, r in in_their_dtypes))
    return gradients


def _recorded(
    function: Function, arrays: Sequence[Tensor], is_differentiated: bool
) -> tuple[tuple[Tensor, ...], Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    """The results and their pullback by PyTorch's autograd, which covers more than `torch.func`."""
    with torch.enable_grad():
        leaves = [
            array.view_as(array)
            if is_differentiated and array.requires_grad
            else array.detach().requires_grad_()
            for array in arrays
        ]
        results = function(*leaves)
    is_recorded = [result.requires_grad for result in results]
    if not any(is_recorded):
        raise RuntimeError(
            "no gradient: as PyTorch's autograd has recorded it, the result does not depend on "
            "its arguments"
        )

    def pullback(cotangents: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        outs, d_outs = (list(compress(each, is_recorded)) for each in (results, cotangents))
        options = {"create_graph": is_differentiated, "materialize_grads": True}
        gradients: tuple[Tensor, ...] = torch.autograd.grad(outs, leaves, d_outs, **options)
        return gradients

    return results, pullback
