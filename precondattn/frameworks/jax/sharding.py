"""JAX on several devices: each device computes its part of the sequences and heads.

A backend's method runs on each device's part alone, without communication; only the gradient of an
input without such an axis, such as a weight, is summed over devices. Arrays that are sharded over
another axis are gathered, and the user is warned once.

For mesh axes of type `Explicit`, whose shardings JAX knows when it traces, this is a
`jax.shard_map`. For `Auto` axes, whose shardings only the compiler knows, it is a
`custom_partitioning`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec, reshard

import precondattn.frameworks.jax.autograd  # noqa: F401  (It registers frames as pytrees.)
from precondattn.arrays import Tree
from precondattn.frameworks.jax import mesh_axes
from precondattn.frameworks.jax.backend import JaxRunner
from precondattn.frameworks.jax.derivative import with_derivative
from precondattn.frameworks.jax.independent_axes import axes_of, axes_of_results

GRADIENTS = ("backward", "step_backward")


def on_shards(verb: str, runner: JaxRunner, *arrays: Tree) -> Tree:
    """The result of `runner.computing(verb)(*arrays)`, each device computing its part."""
    leaves, tree = jax.tree.flatten(arrays)
    shapes = list(map(_shape, leaves))

    def function(*leaves: Tree) -> Tree:
        return runner.computing(verb)(*jax.tree.unflatten(tree, leaves))

    # JAX keeps this function. It refers to shapes only, so that it keeps no tracers alive.
    def axes() -> list[str]:
        forward, given = runner.computing("forward"), jax.tree.unflatten(tree, shapes)
        return list(jax.tree.leaves(axes_of(runner.piece, verb, forward, given)))

    if jax.sharding.get_abstract_mesh().manual_axes:
        return function(*leaves)  # In a user's `shard_map`, arrays are one device's parts.
    call = ShardedCall(str(runner.piece), function, shapes, axes, verb in GRADIENTS)
    meshes = (jax.typeof(leaf).sharding.mesh for leaf in leaves)
    mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
    if mesh is not None:
        return call.on_explicit_shards(mesh, leaves)
    if not all(isinstance(size, int) for leaf in leaves for size in leaf.shape):
        return function(*leaves)  # JAX exports symbolic sizes for one device only.
    # The derivative is that of the function itself, which XLA partitions like any other.
    return with_derivative(call.mappable(), partial(jax.jvp, function))(*leaves)


compiled = partial(jax.jit, static_argnums=(0, 1))(on_shards)
"""`on_shards` as one function that is compiled once for its shapes."""


@dataclass(eq=False)
class ShardedCall:
    """A function of arrays, and the independent axes of its arguments and results."""

    owner: str
    function: Callable[..., Tree]
    shapes: Sequence[jax.ShapeDtypeStruct]
    find_axes: Callable[[], list[str]]
    is_gradient: bool
    context: Tree = field(default_factory=jax.sharding.get_abstract_mesh)

    # Axes are computed only if there are several devices.

    @cached_property
    def axes(self) -> list[str]:
        """The axes of every argument."""
        return self.find_axes()

    @cached_property
    def results(self) -> Tree:
        """The axes of the results, as a tree."""
        return axes_of_results(self.function, self.shapes, self.axes)

    @property
    def texts(self) -> list[str]:
        """The axes of every argument, and of every result."""
        return [*self.axes, *jax.tree.leaves(self.results)]

    def mappable(self) -> Tree:
        """The partitioned function; under `vmap` the mapped axis is independent too."""

        def mapped(_: int, is_mapped: Sequence[bool], *leaves: Tree) -> Tree:
            def axes() -> list[str]:
                digit = next(d for d in "0123456789" if d not in "".join(self.axes))
                each = zip(self.axes, is_mapped, strict=True)
                return [digit + text if mapped else text for text, mapped in each]

            in_axes = tuple(0 if each else None for each in is_mapped)
            function = jax.vmap(self.function, in_axes=in_axes)
            shapes = list(map(_shape, leaves))
            call = ShardedCall(self.owner, function, shapes, axes, self.is_gradient)
            out = call.mappable()(*leaves)
            return out, jax.tree.map(lambda _: True, out)

        function = custom_vmap(self.partitioned())
        function.def_vmap(mapped)
        return function

    def partitioned(self) -> Tree:
        """The function, with a rule for XLA's partitioner."""

        def rule(mesh: Mesh, arguments: Tree, results: Tree) -> str:
            shapes = [tuple(each.shape) for each in (*arguments, *results)]
            return mesh_axes.sharding_rule(self.texts, shapes, len(arguments))

        def partition(mesh: Mesh, arguments: Tree, results: Tree) -> Tree:
            arrays = [*arguments, *jax.tree.leaves(results)]
            if mesh.empty:
                first = arguments[0]
                mesh = mesh_axes.mesh_of(first.sharding, first.shape, self.context)
            specs = [mesh_axes.spec_in(mesh, a.sharding, a.shape) for a in arrays]
            chosen = self._chosen(mesh, arrays, specs)

            def sharding(text: str) -> NamedSharding:
                return NamedSharding(mesh, mesh_axes.spec_of(text, chosen))

            shardings = jax.tree.map(sharding, self.results), tuple(map(sharding, self.axes))
            return mesh, self._part(chosen), *shardings

        function = custom_partitioning(self.function)
        function.def_partition(partition, sharding_rule=rule)
        return function

    def on_explicit_shards(self, mesh: Mesh, leaves: Sequence[Tree]) -> Tree:
        """The results, with explicit shardings like those of the arguments."""
        specs = [jax.typeof(leaf).sharding.spec for leaf in leaves]
        chosen = self._chosen(mesh, leaves, specs)
        in_specs = tuple(mesh_axes.spec_of(text, chosen) for text in self.axes)
        placed = [
            reshard(leaf, NamedSharding(mesh, spec)) if any(spec) else leaf
            for leaf, spec in zip(leaves, in_specs, strict=True)
        ]
        out_specs = jax.tree.map(partial(mesh_axes.spec_of, chosen=chosen), self.results)
        return jax.shard_map(
            self._part(chosen),
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(mesh.explicit_axes),
            check_vma=False,
        )(*placed)

    def _chosen(
        self, mesh: Mesh, arrays: Sequence[Tree], specs: Sequence[PartitionSpec]
    ) -> mesh_axes.MeshAxes:
        """The mesh axes that divide the work; warns if some arguments must be gathered."""
        shapes = [tuple(array.shape) for array in arrays]
        chosen = mesh_axes.chosen_axes(mesh, self.texts[: len(arrays)], shapes, specs)
        mesh_axes.warn_of_gathering(self.owner, self.axes, specs[: len(self.axes)], chosen)
        return chosen

    def _part(self, chosen: mesh_axes.MeshAxes) -> Tree:
        def part(*leaves: Tree) -> Tree:
            results = self.function(*leaves)
            return jax.tree.map(total, results, self.results) if self.is_gradient else results

        def total(gradient: Tree, text: str) -> Tree:
            # The mesh axes over which other arrays are sharded but this one is not.
            names = tuple(n for letter, by in chosen.items() if letter not in text for n in by)
            return jax.lax.psum(gradient, names) if names else gradient

        return part


def _shape(leaf: Tree) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
