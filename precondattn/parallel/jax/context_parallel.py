"""Attention over sequences whose tokens are divided among the devices of JAX."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from precondattn.algebra.mechanism import Mechanism
from precondattn.algebra.piece import BackendNames
from precondattn.arrays import Arrays
from precondattn.parallel.divided_mechanism import HEADS, TOKENS, DividedMechanism
from precondattn.parallel.heads import HeadAxes
from precondattn.parallel.jax import tokens
from precondattn.parallel.jax.call import (
    MASKS,
    DividedArguments,
    DividedCall,
    arguments_of,
    output_axes,
    whole_masks,
)


def context_parallel(
    mechanism: Mechanism | str,
    mesh: Mesh | AbstractMesh,
    axis: str,
    *,
    layout: str | None = None,
) -> ContextParallel:
    """The mechanism, with the tokens of its inputs divided along one axis of a mesh.

    Parameters
    ----------
    mechanism : Mechanism or str
        The mechanism to call, or its expression.
    mesh : jax.sharding.Mesh
        A mesh with this axis. Its other axes are left to JAX.
    axis : str
        The axis of the mesh that divides tokens.
    layout : str, optional
        How a call is divided (`precondattn.parallel`): by "heads"; or by tokens, in the order
        "contiguous", "zigzag" or "cyclic[block=B]" (`precondattn.parallel.layouts`). In the last
        two the tokens of a device are not consecutive, and arrays must be in the order of
        `to_layout`. The default is "heads" if the number of heads can be divided among the devices,
        and "contiguous" otherwise. A device has the same tokens in both.

    Returns
    -------
    ContextParallel
        It is called like the mechanism, inside or outside `jit`. It takes whole arrays, shards
        their tokens along the axis if they are not, and returns an output that is sharded alike.
        In a `shard_map` over the axis it takes and returns each device's part. `lengths` are whole;
        `cu_seqlens` are not supported.

    Raises
    ------
    TypeError, ValueError
        if the mesh has no such axis, or the layout is unknown. In a call: if the number of tokens
        is not a multiple of P, the number of devices (of 2 P in "zigzag", and of B P in
        "cyclic[block=B]"), or if the layout can not divide the heads, or the tokens of a leaf.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, numpy as np, precondattn as pa
    >>> mesh = jax.make_mesh((1,), ("cp",))
    >>> attn = context_parallel("lucid", mesh, "cp")
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
    >>> bool(jnp.allclose(attn(q, k, v), pa.lucid(q, k, v), atol=1e-6))
    True
    """
    return ContextParallel(mechanism, mesh, axis, layout)


def _output_of_heads(call: DividedCall, arguments: DividedArguments) -> Array:
    """The output of a device's tokens, from its parts of the arguments."""
    of_heads = {name: _of_heads(x, call, call.axes[name]) for name, x in arguments.inputs.items()}
    out = call.mechanism(**of_heads, **whole_masks(call, arguments), backend=call.backend)
    axes = output_axes(call.mechanism)
    return lax.all_to_all(out, call.axis, axes.time, axes.heads, tiled=True)


def _of_heads(x: Array, call: DividedCall, axes: HeadAxes) -> Array:
    """All tokens of this device's heads."""
    time, heads = axes
    if heads is None:
        return x if time is None else lax.all_gather(x, call.axis, axis=time, tiled=True)
    if x.shape[heads] < call.devices:
        # Each head goes to the devices that have its query heads.
        x = jnp.repeat(x, call.devices // x.shape[heads], axis=heads)
    if time is not None:
        return lax.all_to_all(x, call.axis, heads, time, tiled=True)
    count = x.shape[heads] // call.devices
    return lax.dynamic_slice_in_dim(x, lax.axis_index(call.axis) * count, count, heads)


class ContextParallel(DividedMechanism):
    """A mechanism whose tokens are divided among devices; made by `context_parallel`."""

    outputs = {HEADS: _output_of_heads, TOKENS: tokens.output}  # noqa: RUF012

    def __init__(
        self,
        mechanism: Mechanism | str,
        mesh: Mesh | AbstractMesh,
        axis: str,
        layout: str | None,
    ) -> None:
        super().__init__(mechanism, layout)
        if axis not in mesh.axis_names:
            raise ValueError(
                f"{self.owner}: axis must be one of the mesh's, "
                f"{', '.join(map(repr, mesh.axis_names))}; found {axis!r}"
            )
        self.mesh, self.axis, self.devices = mesh, axis, mesh.shape[axis]

    def __repr__(self) -> str:
        return (
            f"context_parallel({str(self.mechanism)!r}, {self.mesh}, {self.axis!r}, "
            f"layout={self.layout!r})"
        )

    def __call__(self, *arrays: Array, backend: BackendNames = None, **named: Array) -> Array:
        """The output of all tokens; in a `shard_map` over the axis, of this device's tokens."""
        arguments, call, way, is_part = self._checked(arrays, named, backend)
        function = partial(self.outputs[way], call)
        if is_part:
            return function(arguments)
        specs = DividedArguments(
            {name: self._spec(call.axes[name].time) for name in arguments.inputs},
            {name: self._spec(MASKS[name]) for name in arguments.masks},
        )
        if self.axis in self.mesh.explicit_axes:
            # A `shard_map` of explicit shardings expects its arguments sharded.
            places = jax.tree.map(partial(NamedSharding, self.mesh), specs)
            arguments = jax.tree.map(reshard, arguments, places)
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(specs,),
            out_specs=self._spec(output_axes(self.mechanism).time),
            axis_names={self.axis},
            check_vma=False,
        )(arguments)

    def refusal(self, *arrays: Array, backend: BackendNames = None, **named: Array) -> str | None:
        """The reason why the layout can not divide a call with these arguments; None if it can."""
        return self._way_of(self._described(arrays, named, backend)[1])[1]

    def _checked(
        self, arrays: tuple[Array, ...], named: Arrays, backend: BackendNames
    ) -> tuple[DividedArguments, DividedCall, str, bool]:
        """The arguments, the call, how it is divided, and whether they are parts."""
        arguments, call, is_part = self._described(arrays, named, backend)
        way = self._way(call)
        if way == TOKENS:  # The mechanism checks all tokens of the layout `heads`.
            tokens.check(call, arguments, is_part=is_part)
        return arguments, call, way, is_part

    def _described(
        self, arrays: tuple[Array, ...], named: Arrays, backend: BackendNames
    ) -> tuple[DividedArguments, DividedCall, bool]:
        """The arguments, the call, and whether the arguments are one device's parts."""
        arguments = arguments_of(self.mechanism, self.owner, arrays, named)
        is_part = self.axis in jax.sharding.get_abstract_mesh().manual_axes
        declared, shapes, axes = self.mechanism.inputs, {}, {}
        where = "of this device" if is_part else f"on {self.devices} devices"
        for name, x in arguments.inputs.items():
            axes[name] = HeadAxes.of_pattern(declared[name], x.shape)
            time, whole = axes[name].time, list(x.shape)
            if time is not None:
                multiple = declared[name].axes[time].multiple * (1 if is_part else self.devices)
                multiple *= 1 if self.order is None else self.order.divisor
                if x.shape[time] == 0 or x.shape[time] % multiple:
                    raise ValueError(
                        f"{self.owner}: {name} has {x.shape[time]} tokens; layout "
                        f"{str(self.order or HEADS)!r} expects a multiple of {multiple} {where} "
                        f"(pad them, and give lengths)"
                    )
                whole[time] *= self.devices if is_part else 1
            shapes[name] = tuple(whole)
        sizes, masks = declared.sizes(self.owner, shapes), tuple(arguments.masks)
        of_mesh = self.axis, self.devices, self.order, backend
        call = DividedCall(self.owner, self.mechanism, *of_mesh, axes, sizes, masks)
        return arguments, call, is_part

    def _spec(self, time: int | None) -> P:
        return P() if time is None else P(*(None,) * time, self.axis)
