"""Attention to sequences that are divided among the devices of JAX."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from precondattn.algebra.declaration import Pattern
from precondattn.algebra.expression import parse
from precondattn.execution.input_names import CALL_OPTIONS, inputs_by_name
from precondattn.parallel.heads import Axes, refusal

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Mechanism

LAYOUTS = ("heads",)
MASKS = {"lengths": None, "key_mask": 1, "segment_ids": 1}
"""The axis of a mask's tokens."""


def context_parallel(
    mechanism: Mechanism | str, mesh: Mesh | AbstractMesh, axis: str, *, layout: str = "heads"
) -> ContextParallel:
    """The mechanism, with the tokens of its inputs divided along an axis of a mesh.

    Parameters
    ----------
    mechanism : Mechanism or str
        What to call, or its expression.
    mesh : jax.sharding.Mesh
        With that axis. Its other axes are left to JAX.
    axis : str
        The axis of the mesh that divides tokens.
    layout : {"heads"}
        How a call is divided (`precondattn.parallel`).

    Returns
    -------
    ContextParallel
        Called as the mechanism, under `jit` or not. It takes whole arrays, and shards their tokens
        where they are not; so is its result. In a `shard_map` over the axis it takes and returns
        each device's part. `lengths` are whole; `cu_seqlens` are not supported.

    Raises
    ------
    ValueError
        if the mesh has no such axis, or the layout is unknown. In a call: if the number of tokens
        is no multiple of that of devices, or the layout can not divide the heads.

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
    if layout not in LAYOUTS:
        raise ValueError(
            f"{owner}: layout must be one of {', '.join(map(repr, LAYOUTS))}; found {layout!r}"
        )
    if any(leaf.mixes_sequences for leaf in mechanism.program.leaves):
        raise ValueError(
            f"{owner}: the output of a sequence depends on all others, which no layout divides"
        )
    return ContextParallel(mechanism, mesh, axis, layout)


class ContextParallel:
    """A mechanism for parts of sequences; `context_parallel` makes it."""

    def __init__(
        self, mechanism: Mechanism, mesh: Mesh | AbstractMesh, axis: str, layout: str
    ) -> None:
        self.mechanism, self.mesh, self.axis, self.layout = mechanism, mesh, axis, layout
        self.owner = f"context_parallel({mechanism})"
        self.devices = mesh.shape[axis]

    def __repr__(self) -> str:
        return f"context_parallel({str(self.mechanism)!r}, {self.mesh}, {self.axis!r})"

    def __call__(self, *arrays: Any, backend: Any = None, **named: Any) -> Array:
        """The output of all tokens, or, in a `shard_map` over the axis, of this device's."""
        declared = self.mechanism.inputs
        masks = {name: named.pop(name) for name in MASKS if name in named}
        masks = {name: jnp.asarray(mask) for name, mask in masks.items() if mask is not None}
        inputs = inputs_by_name(str(self.mechanism), declared, arrays, named, CALL_OPTIONS)
        axes = {name: Axes.of(declared[name], x.shape) for name, x in inputs.items()}
        is_part = self.axis in jax.sharding.get_abstract_mesh().manual_axes
        self._check(inputs, axes, is_part=is_part)
        function = partial(self._on_device, axes, backend)
        if is_part:
            return function(inputs, masks)
        specs = (
            {name: self._spec(axes[name].time) for name in inputs},
            {name: self._spec(MASKS[name]) for name in masks},
        )
        if self.axis in self.mesh.explicit_axes:
            inputs, masks = jax.tree.map(self._resharded, (inputs, masks), specs)
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=specs,
            out_specs=self._spec(self._output_axes().time),
            axis_names={self.axis},
            check_vma=False,
        )(inputs, masks)

    def _check(
        self, inputs: Mapping[str, Array], axes: Mapping[str, Axes], *, is_part: bool
    ) -> None:
        declared, shapes = self.mechanism.inputs, {}
        for name, x in inputs.items():
            time, shape = axes[name].time, list(x.shape)
            if time is not None and is_part:
                shape[time] *= self.devices
            if time is not None and shape[time] % self.devices:
                raise ValueError(
                    f"{self.owner}: {name} has {shape[time]} tokens; a multiple of "
                    f"{self.devices} devices is expected (pad them, and give lengths)"
                )
            shapes[name] = tuple(shape)
        refused = refusal(self.mechanism, declared.sizes(self.owner, shapes), self.devices)
        if refused is not None:
            raise ValueError(f"{self.owner}: layout {self.layout!r} {refused}")

    def _resharded(self, x: Array, spec: P) -> Array:
        """x with its tokens sharded, as a `shard_map` of explicit shardings expects."""
        return reshard(x, NamedSharding(self.mesh, spec))

    def _spec(self, time: int | None) -> P:
        return P() if time is None else P(*(None,) * time, self.axis)

    def _output_axes(self) -> Axes:
        pattern: Pattern = self.mechanism.program.output
        return Axes.of(pattern, (2,) * len(pattern.axes))

    def _on_device(
        self,
        axes: Mapping[str, Axes],
        backend: Any,
        inputs: Mapping[str, Array],
        masks: Mapping[str, Array],
    ) -> Array:
        """The output of this device's tokens, from its part of everything."""
        of_heads = {name: self._of_heads(x, axes[name]) for name, x in inputs.items()}
        whole = {
            name: mask
            if MASKS[name] is None
            else lax.all_gather(mask, self.axis, axis=1, tiled=True)
            for name, mask in masks.items()
        }
        out = self.mechanism(**of_heads, **whole, backend=backend)
        time, heads = self._output_axes()
        return lax.all_to_all(out, self.axis, time, heads, tiled=True)

    def _of_heads(self, x: Array, axes: Axes) -> Array:
        """All tokens of this device's heads."""
        time, heads = axes
        if heads is None:
            return x if time is None else lax.all_gather(x, self.axis, axis=time, tiled=True)
        if x.shape[heads] < self.devices:
            # Each head goes to the devices that have its query heads.
            x = jnp.repeat(x, self.devices // x.shape[heads], axis=heads)
        if time is not None:
            return lax.all_to_all(x, self.axis, heads, time, tiled=True)
        count = x.shape[heads] // self.devices
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis) * count, count, heads)
