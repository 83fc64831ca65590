"""The solver for batches of triangular systems in JAX; on a CPU it solves one system at a time.

A batched LAPACK call waits for XLA's threads on one of them. If as many batched solves as there are
threads run at once, they deadlock. If a batch is sharded, every device solves its own systems.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from precondattn.arrays import Tree


@partial(jax.jit, static_argnames="lower")
def solve_triangular(matrix: Array, right: Array, *, lower: bool) -> Array:
    """The solution matrix⁻¹ right (…, s, e), for stacks (…, s, s) and (…, s, e)."""
    solution: Array = lax.platform_dependent(
        matrix,
        right,
        cpu=partial(_solve_on_cpu, lower=lower),
        default=partial(jax.scipy.linalg.solve_triangular, lower=lower),
    )
    return solution


def _solve_on_cpu(matrix: Array, right: Array, *, lower: bool) -> Array:
    # JAX does not differentiate the solver: a derivative is another solve, with the derivative of
    # the product on the right-hand side.
    solution: Array = lax.custom_linear_solve(
        lambda x: matrix @ x,
        right,
        solve=lambda _, b: _ONE_BY_ONE[lower](matrix, b),
        transpose_solve=lambda _, b: _ONE_BY_ONE[not lower](jnp.matrix_transpose(matrix), b),
    )
    return solution


def _one_by_one(lower: bool) -> Callable[[Array, Array], Array]:
    """The function that solves systems one after another, for lower or upper matrices."""

    def one_by_one(matrix: Array, right: Array) -> Array:
        systems = tuple(jnp.reshape(x, (-1, *x.shape[-2:])) for x in (matrix, right))
        solutions = lax.map(
            lambda system: jax.scipy.linalg.solve_triangular(*system, lower=lower), systems
        )
        return jnp.reshape(solutions, right.shape)

    def of_each_device(mesh: Mesh, arguments: Tree, _: object) -> Tree:
        """The rule by which every device solves its own systems."""
        sharding = arguments[1].sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(mesh, PartitionSpec(*sharding.spec[:-2], None, None))
        else:  # The mesh axes are unknown: every device solves all systems.
            devices = np.array(list(sharding.devices_indices_map(arguments[1].shape)))
            sharding = NamedSharding(Mesh(devices, ("devices",)), PartitionSpec())
        return mesh, one_by_one, sharding, (sharding, sharding)

    partitioned = custom_partitioning(one_by_one)
    partitioned.def_partition(of_each_device, sharding_rule="... i j, ... k l -> ... m n")

    @custom_vmap
    def solve(matrix: Array, right: Array) -> Array:
        in_shard_map = jax.sharding.get_abstract_mesh().manual_axes
        solution: Array = (one_by_one if in_shard_map else partitioned)(matrix, right)
        return solution

    @solve.def_vmap
    def _(size: int, mapped: list[bool], matrix: Array, right: Array) -> tuple[Array, bool]:
        """The rule of `vmap`, which makes the mapped axis one more batch axis."""
        both = (
            x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
            for x, has_axis in zip((matrix, right), mapped, strict=True)
        )
        return solve(*both), True

    result: Callable[[Array, Array], Array] = solve
    return result


_ONE_BY_ONE = {lower: _one_by_one(lower) for lower in (False, True)}
"""The solver for lower (True) or upper (False) triangular matrices."""
