"""Attention over sequences whose tokens are divided among the devices of JAX."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import jax
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from precondattn.algebra.mechanism import parse
from precondattn.parallel.advised_layouts import advice
from precondattn.parallel.heads import HeadAxes
from precondattn.parallel.jax import heads
from precondattn.parallel.jax import tokens as tokens_jax
from precondattn.parallel.jax.call import (
    MASKS,
    DividedArguments,
    DividedCall,
    arguments_of,
    output_axes,
)
from precondattn.parallel.layouts import TokenOrder
from precondattn.parallel.plan import Plan

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Mechanism
    from precondattn.algebra.piece import BackendNames
    from precondattn.arrays import Arrays


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
    if isinstance(mechanism, str):
        mechanism = parse(mechanism)
    owner = f"context_parallel({mechanism})"
    if axis not in mesh.axis_names:
        raise ValueError(
            f"{owner}: axis must be one of the mesh's, {', '.join(map(repr, mesh.axis_names))}; "
            f"found {axis!r}"
        )
    try:
        order = None if layout == "heads" else TokenOrder.read(layout or "contiguous")
    except ValueError as error:
        raise ValueError(f"{owner}: {error}") from None
    if mechanism.mixes_sequences:
        raise ValueError(
            f"{owner}: the output of a sequence depends on all others, which no layout divides"
        )
    return ContextParallel(mechanism, mesh, axis, layout, order)


class ContextParallel:
    """A mechanism whose tokens are divided among devices; made by `context_parallel`."""

    def __init__(
        self,
        mechanism: Mechanism,
        mesh: Mesh | AbstractMesh,
        axis: str,
        layout: str | None,
        order: TokenOrder | None,
    ) -> None:
        self.mechanism, self.mesh, self.axis = mechanism, mesh, axis
        self.layout, self.order = layout, order
        self.owner = f"context_parallel({mechanism})"
        self.devices = mesh.shape[axis]

    def __repr__(self) -> str:
        return (
            f"context_parallel({str(self.mechanism)!r}, {self.mesh}, {self.axis!r}, "
            f"layout={self.layout!r})"
        )

    def __call__(self, *arrays: Array, backend: BackendNames = None, **named: Array) -> Array:
        """The output of all tokens; in a `shard_map` over the axis, of this device's tokens."""
        given, call, way, is_part = self._checked(arrays, named, backend)
        function = partial(way.output, call)
        if is_part:
            return function(given)
        specs = DividedArguments(
            {name: self._spec(call.axes[name].time) for name in given.inputs},
            {name: self._spec(MASKS[name]) for name in given.masks},
        )
        if self.axis in self.mesh.explicit_axes:
            given = jax.tree.map(self._resharded, given, specs)
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(specs,),
            out_specs=self._spec(output_axes(self.mechanism).time),
            axis_names={self.axis},
            check_vma=False,
        )(given)

    def refusal(self, *arrays: Array, backend: BackendNames = None, **named: Array) -> str | None:
        """The reason why the layout can not divide a call with these arguments; None if it can."""
        given, call, _ = self._described(arrays, named, backend)
        way, refused = self._way_of(call, given)
        return refused if way is None else None

    def explain(self, *arrays: Array, backend: BackendNames = None, **named: Array) -> Plan:
        """How a call with these arguments is divided, and what each device sends."""
        _, call, way, _ = self._checked(arrays, named, backend)
        return Plan(
            str(self.mechanism),
            self._name_of(way),
            f"each of {self.devices} devices",
            call.tokens // self.devices,
            way.during(call),
            way.bytes_sent(call),
        )

    def _checked(
        self, arrays: tuple[Array, ...], named: Arrays, backend: BackendNames
    ) -> tuple[DividedArguments, DividedCall, ModuleType, bool]:
        """The arguments, the call, the module that divides it, and whether they are parts."""
        given, call, is_part = self._described(arrays, named, backend)
        way, refused = self._way_of(call, given)
        if way is None:
            raise ValueError(f"{self.owner}: {refused}")
        way.check(call, given, is_part=is_part)
        return given, call, way, is_part

    def _described(
        self, arrays: tuple[Array, ...], named: Arrays, backend: BackendNames
    ) -> tuple[DividedArguments, DividedCall, bool]:
        """The arguments, the call, and whether the arguments are one device's parts."""
        given = arguments_of(self.mechanism, self.owner, arrays, named)
        is_part = self.axis in jax.sharding.get_abstract_mesh().manual_axes
        return given, self._call(given.inputs, backend, is_part=is_part), is_part

    def _way_of(self, call: DividedCall, given: DividedArguments) -> tuple[ModuleType | None, str]:
        """The module that divides a call, or None and the reason why none can."""
        reasons = []
        for way in self._ways():
            refused = way.refusal(call, given.masks)
            if refused is None:
                return way, ""
            reasons.append(f"layout {self._name_of(way)!r} {refused}")
        return None, "; ".join(reasons) + advice(self._refusals_of_others(call, given))

    def _refusals_of_others(
        self, call: DividedCall, given: DividedArguments
    ) -> dict[str, str | None]:
        """The refusals of `heads` and `contiguous`.

        `contiguous` divides every call that another order of tokens divides.
        """
        in_order = call._replace(order=TokenOrder("contiguous"))
        return {
            "heads": heads.refusal(call, given.masks),
            "contiguous": tokens_jax.refusal(in_order, given.masks),
        }

    def _ways(self) -> tuple[ModuleType, ...]:
        """The modules that may divide a call; the first one that does not refuse it does."""
        if self.layout is None:
            return heads, tokens_jax
        return (heads,) if self.order is None else (tokens_jax,)

    def _name_of(self, way: ModuleType) -> str:
        return "heads" if way is heads else str(self.order)

    def _call(
        self, inputs: Mapping[str, Array], backend: BackendNames, *, is_part: bool
    ) -> DividedCall:
        """The call with its sizes and the parts of its inputs.

        Raises
        ------
        ValueError
            if sizes do not fit; the message names the input.
        """
        declared, shapes, parts = self.mechanism.inputs, {}, {}
        axes = {name: HeadAxes.of_pattern(declared[name], x.shape) for name, x in inputs.items()}
        divisor = 1 if self.order is None else self.order.divisor
        for name, x in inputs.items():
            time, part, whole = axes[name].time, list(x.shape), list(x.shape)
            if time is not None:
                multiple = divisor * declared[name].axes[time].multiple
                multiple *= 1 if is_part else self.devices
                if x.shape[time] == 0 or x.shape[time] % multiple:
                    raise ValueError(self._not_a_multiple(name, x.shape[time], multiple, is_part))
                if is_part:
                    whole[time] *= self.devices
                else:
                    part[time] //= self.devices
            shapes[name] = tuple(whole)
            parts[name] = jax.ShapeDtypeStruct(tuple(part), x.dtype)
        sizes = declared.sizes(self.owner, shapes)
        return DividedCall(
            self.owner,
            self.mechanism,
            self.axis,
            self.devices,
            self.order,
            backend,
            axes,
            parts,
            sizes,
        )

    def _not_a_multiple(self, name: str, tokens: int, multiple: int, is_part: bool) -> str:
        where = "of this device" if is_part else f"on {self.devices} devices"
        layout = str(self.order or "heads")
        return (
            f"{self.owner}: {name} has {tokens} tokens; layout {layout!r} expects a multiple "
            f"of {multiple} {where} (pad them, and give lengths)"
        )

    def _resharded(self, x: Array, spec: P) -> Array:
        """x with its tokens sharded, as a `shard_map` of explicit shardings expects."""
        return reshard(x, NamedSharding(self.mesh, spec))

    def _spec(self, time: int | None) -> P:
        return P() if time is None else P(*(None,) * time, self.axis)
