"""JAX: a function with a custom derivative that is kept inside loops.

JAX 0.10 and 0.11 lose the rule of a `jax.custom_jvp` in the body of a loop, and would differentiate
the operations inside when they differentiate the gradient. So the function is a primitive here,
which JAX keeps whole. JAX 0.12 keeps the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from precondattn.arrays import Tree

Arrays = Sequence[Any]
Derivative = Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]
"""A function from arguments, and the tangents of real ones, to results and the tangents of real
ones."""

call_p = Primitive("differentiated_call")
call_p.multiple_results = True


def with_derivative(
    function: Callable[..., Tree], derivative: Callable[[Tree, Tree], tuple[Tree, Tree]]
) -> Callable[..., Tree]:
    """A function of trees of arrays, with a derivative such as `jax.custom_jvp` takes.

    Neither may refer to a traced array that is not an argument.
    """

    def call(*arguments: Tree) -> Tree:
        leaves, tree = jax.tree.flatten(arguments)
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return function(*arguments)

        def flat(primals: Arrays, moving: Arrays) -> tuple[Arrays, Arrays]:
            given = iter(moving)
            tangents = [next(given) if _is_real(x) else no_tangent(x) for x in primals]
            trees = (jax.tree.unflatten(tree, each) for each in (primals, tangents))
            results, d_results = (jax.tree.leaves(each) for each in derivative(*trees))
            each = zip(results, d_results, strict=True)
            return results, [d_result for result, d_result in each if _is_real(result)]

        # JAX keeps what it traced of a function, and constants of modules may have changed.
        traced, shapes = jax.make_jaxpr(partial(function), return_shape=True)(*arguments)
        results = call_p.bind(*leaves, traced=traced, derivative=flat)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def _is_real(array: Tree) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


def no_tangent(array: Tree) -> Tree:
    """The tangent, and the cotangent, of an array of integers or booleans."""
    return np.zeros(array.shape, dtype=jax.dtypes.float0)


def _computed(*arguments: Tree, traced: ClosedJaxpr, derivative: Derivative) -> Tree:
    return jaxpr_as_fun(traced)(*arguments)


def _abstract(*_: Tree, traced: ClosedJaxpr, derivative: Derivative) -> Tree:
    return traced.out_avals, traced.effects


def _differentiated(
    primals: Arrays, tangents: Arrays, *, traced: ClosedJaxpr, derivative: Derivative
) -> Tree:
    moving = [
        jnp.zeros_like(primal) if isinstance(tangent, ad.Zero) else tangent
        for primal, tangent in zip(primals, tangents, strict=True)
        if _is_real(primal)
    ]
    results, moved = derivative(primals, moving)
    given = iter(moved)
    return results, [
        next(given) if _is_real(result) else ad.Zero(jax.typeof(result).to_tangent_aval())
        for result in results
    ]


def _mapped(arrays: Arrays, axes: Arrays, *, traced: ClosedJaxpr, derivative: Derivative) -> Tree:
    each = zip(traced.in_avals, axes, strict=True)
    axes_of_moving = [axis for aval, axis in each if _is_real(aval)]
    function = jax.vmap(jaxpr_as_fun(traced), in_axes=tuple(axes))  # None: not mapped.

    def of_all(primals: Arrays, moving: Arrays) -> Tree:
        in_axes = (list(axes), axes_of_moving)
        return jax.vmap(derivative, in_axes=in_axes)(list(primals), list(moving))

    whole = jax.make_jaxpr(function)(*arrays)
    results = call_p.bind(*arrays, traced=whole, derivative=of_all)
    return results, [0] * len(results)


call_p.def_impl(_computed)
call_p.def_effectful_abstract_eval(_abstract)
ad.primitive_jvps[call_p] = _differentiated
batching.primitive_batchers[call_p] = _mapped
mlir.register_lowering(call_p, mlir.lower_fun(_computed, multiple_results=True))
