"""JAX: the mesh axes that divide sequences and heads, and the arrays that must be gathered.

axes of an array     "bthd"
its sharding         P("data", None, "model")
chosen               {"b": ("data",), "h": ("model",)}
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import count, product
from math import prod

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from precondattn.algebra.declaration import LETTERS
from precondattn.arrays import Shape
from precondattn.backend import GatheredWarning
from precondattn.frameworks.jax.independent_axes import NUMBERED, is_independent

MeshAxes = Mapping[str, tuple[str, ...]]
"""The mesh axes over which an independent axis is sharded, by the axis's letter."""

TIME = "tsc"

REASONS = {
    "t": "precondattn.parallel.jax.context_parallel divides them",
    "b": "their number is not divisible by that of devices",
    "h": "the number of key/value heads is not divisible by that of devices",
    NUMBERED: "the decay of a head depends on its number among all heads",
}
OTHER_REASON = "only sequences and heads are computed in parts"

NAMES = {**LETTERS, "t": "time", "b": "batch", "h": "heads", NUMBERED: "heads"}


def chosen_axes(
    mesh: Mesh, texts: Sequence[str], shapes: Sequence[Shape], specs: Sequence[PartitionSpec]
) -> MeshAxes:
    """For each independent axis, the largest of the arrays' shardings that divides its size."""
    found: dict[str, set[tuple[str, ...]]] = {}
    smallest: dict[str, int] = {}
    for text, shape, spec in zip(texts, shapes, specs, strict=True):
        for letter, size, names in zip(text, shape, _names(spec, text), strict=True):
            if is_independent(letter):
                found.setdefault(letter, set()).add(names)
                smallest[letter] = min(size, smallest.get(letter, size))
    chosen: dict[str, tuple[str, ...]] = {}
    for letter, candidates in sorted(found.items()):
        taken = {name for names in chosen.values() for name in names}
        fitting = [
            (devices, names)
            for names in candidates
            if not taken.intersection(names)
            and smallest[letter] % (devices := prod(mesh.shape[n] for n in names)) == 0
        ]
        chosen[letter] = max(fitting, default=(1, ()))[1]
    return chosen


def _names(spec: PartitionSpec, text: str) -> list[tuple[str, ...]]:
    """The mesh axes over which each axis of an array is sharded."""
    padded = (*spec, *(None,) * (len(text) - len(spec)))
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in padded]


def mesh_of(sharding: Sharding, shape: Shape, known: AbstractMesh) -> Mesh:
    """The mesh of a sharding; `known` for a sharding without a mesh on as many devices."""
    devices = np.array(list(sharding.devices_indices_map(shape)))
    if known.size != devices.size:
        return Mesh(devices, ("devices",))
    return Mesh(devices.reshape(known.axis_sizes), known.axis_names)


def spec_in(mesh: Mesh, sharding: Sharding, shape: Shape) -> PartitionSpec:
    """The sharding in terms of mesh axes; empty, so that it is gathered, if that is impossible."""
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    wanted = sharding.devices_indices_map(shape)
    for places in product((None, *range(len(shape))), repeat=len(mesh.axis_names)):
        names: list[tuple[str, ...]] = [() for _ in shape]
        for name, axis in zip(mesh.axis_names, places, strict=True):
            if axis is not None:
                names[axis] += (name,)
        spec = PartitionSpec(*(each or None for each in names))
        try:
            found = NamedSharding(mesh, spec).devices_indices_map(shape)
        except ValueError:  # The size is not divisible.
            continue
        if found == wanted:
            return spec
    return PartitionSpec()


def spec_of(text: str, chosen: MeshAxes) -> PartitionSpec:
    """The sharding of an array over its independent axes only."""
    return PartitionSpec(*(chosen.get(letter) or None for letter in text))


def sharding_rule(texts: Sequence[str], shapes: Sequence[Shape], arguments: int) -> str:
    """The rule for Shardy, JAX's partitioner, such as `"ib_2 x0 ih_4 -> ib_2 ih_4"`.

    Query heads and fewer key/value heads are different factors: Shardy would divide two heads by a
    part of a mesh axis of four devices, which JAX can not express.
    """
    numbers = count()

    def factor(letter: str, size: int) -> str:
        return f"i{letter}_{size}" if is_independent(letter) else f"x{next(numbers)}"

    words = [
        " ".join(factor(letter, size) for letter, size in zip(text, shape, strict=True))
        for text, shape in zip(texts, shapes, strict=True)
    ]
    return f"{', '.join(words[:arguments])} -> {', '.join(words[arguments:])}"


def warn_of_gathering(
    owner: str, texts: Sequence[str], specs: Sequence[PartitionSpec], chosen: MeshAxes
) -> None:
    """Warn about arguments that must be gathered, once for each kind of axis."""
    for text, spec in zip(texts, specs, strict=True):
        for letter, names in zip(text, _names(spec, text), strict=True):
            kind = "t" if letter in TIME else letter
            if kind in _warned or set(names) <= set(chosen.get(letter, ())):
                continue
            _warned.add(kind)
            warnings.warn(
                f"{owner}: an array is sharded over {NAMES.get(kind, 'another axis')}, and is "
                f"gathered on every device: {REASONS.get(kind, OTHER_REASON)}",
                GatheredWarning,
                stacklevel=1,
            )


_warned: set[str] = set()
