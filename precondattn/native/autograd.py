"""Gradients of functions by the automatic differentiation of PyTorch or JAX."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from precondattn.arrays import Array, cast, library_of, transforms_of, wants_gradient

DIFFERENTIATING = frozenset({"torch", "jax"})
"""The libraries that have automatic differentiation."""

Function = Callable[..., tuple[Array, ...]]


def vjp(
    function: Function, arrays: Sequence[Array], cotangents: Sequence[Array]
) -> tuple[Array, ...]:
    """The gradients of the arrays, from the cotangents of all results of `function(*arrays)`.

    Raises
    ------
    RuntimeError
        if, according to PyTorch's autograd, none of the results depends on the arrays.
    """
    if library_of(arrays[0]) == "jax":
        results, pullback = sys.modules["jax"].vjp(function, *arrays)
    elif transforms_of(*arrays, *cotangents):
        results, pullback = sys.modules["torch"].func.vjp(function, *arrays)
    else:
        results, pullback = _recorded(function, arrays, wants_gradient(*arrays, *cotangents))
    in_their_dtypes = zip(cotangents, results, strict=True)
    gradients: tuple[Array, ...] = pullback(tuple(cast(d, r.dtype) for d, r in in_their_dtypes))
    return gradients


def _recorded(
    function: Function, arrays: Sequence[Array], is_differentiated: bool
) -> tuple[tuple[Array, ...], Callable[[tuple[Array, ...]], tuple[Array, ...]]]:
    """The results and their pullback by PyTorch's autograd, which covers more than `torch.func`.

    The gradients can be differentiated again if the arrays or their cotangents require it.
    """
    torch = sys.modules["torch"]
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

    def pullback(cotangents: tuple[Array, ...]) -> tuple[Array, ...]:
        chosen = [
            (result, cotangent)
            for result, cotangent, recorded in zip(results, cotangents, is_recorded, strict=True)
            if recorded
        ]
        outs, given = zip(*chosen, strict=True)
        found: tuple[Array, ...] = torch.autograd.grad(
            outs, leaves, given, create_graph=is_differentiated, materialize_grads=True
        )
        return found

    return results, pullback
