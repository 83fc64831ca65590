"""The shardings that the DTensors of a call may have: over sequences and over heads.

An input without the sharded axis, such as a weight or λ, or a single key head, is replicated. Every
device has one term of its gradient, which therefore has the placement `Partial`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from precondattn.algebra.declaration import HEADS, LETTERS, Pattern
from precondattn.arrays import Arrays

Patterns = dict[str, Pattern]
Placements = tuple[Placement, ...]

MASKS = {
    "lengths": Pattern.read("b"),
    "key_mask": Pattern.read("b s"),
    "segment_ids": Pattern.read("b s"),
    "cu_seqlens": Pattern.read("s"),
}
NAMES = {"b": "the batch", "h": "the heads"}


class MeshSharding(NamedTuple):
    """The letter of what each mesh dimension divides: "b" sequences, "h" heads, "" nothing."""

    mesh: DeviceMesh
    divided: tuple[str, ...]
    counts: Mapping[str, int]

    def placements(self, pattern: Pattern, shape: tuple[int, ...] | None = None) -> Placements:
        """The placements of an array with this pattern; `shape` shows which axes broadcast."""
        placements: list[Placement] = []
        for what in self.divided:
            letters = HEADS if what == "h" else what
            axis = next((i for i, axis in enumerate(pattern.letters) if axis in letters), None)
            is_one = axis is not None and (
                self.counts.get(pattern.letters[axis], 1) == 1
                or (pattern.axes[axis].broadcasts and shape is not None and shape[axis] == 1)
            )
            placements.append(Replicate() if not what or axis is None or is_one else Shard(axis))
        return tuple(placements)

    def of_gradient(self, array: DTensor) -> Placements:
        """The placements of an array's gradient: `Partial` for a replicated array."""
        return tuple(
            Partial() if what and placement.is_replicate() else placement
            for what, placement in zip(self.divided, array.placements, strict=True)
        )

    def part(self, array: DTensor) -> Tensor:
        """This device's part of an array, differentiable."""
        return array.to_local(grad_placements=self.of_gradient(array))

    def parts(self, arrays: Mapping[str, DTensor]) -> dict[str, Tensor]:
        return {name: self.part(array) for name, array in arrays.items()}

    def whole(self, part: Tensor, placements: Placements) -> DTensor:
        return DTensor.from_local(part, self.mesh, placements, run_check=False)

    def whole_gradients(self, parts: Arrays, arrays: Arrays) -> Arrays:
        return {n: self.whole(part, self.of_gradient(arrays[n])) for n, part in parts.items()}


def sharding_of(owner: str, patterns: Patterns, arrays: Mapping[str, Tensor]) -> MeshSharding:
    """The sharding that all arrays have in common; an error names an array with another one."""
    for name, array in arrays.items():
        if not isinstance(array, DTensor):
            raise TypeError(
                f"{owner}: {name} must be a DTensor, as others are; found "
                f"{type(array).__name__} (`distribute_tensor` makes one)"
            )
    mesh = next(iter(arrays.values())).device_mesh
    divided, by = [""] * mesh.ndim, [""] * mesh.ndim
    counts: dict[str, int] = {}
    for name, array in arrays.items():
        if array.device_mesh != mesh:
            raise ValueError(
                f"{owner}: DTensors on one mesh expected; {name} is on {array.device_mesh}, "
                f"{next(iter(arrays))} on {mesh}"
            )
        for axis, size in zip(patterns[name].axes, array.shape, strict=False):
            if axis.letter == "b" or axis.letter in HEADS:
                counts[axis.letter] = max(counts.get(axis.letter, 1), size // axis.multiple)
        for i, placement in enumerate(array.placements):
            what = _divided_by(owner, name, patterns[name], array, placement, i)
            if what and divided[i] not in ("", what):
                raise ValueError(
                    f"{owner}: {_dimension(mesh, i)} divides {NAMES[divided[i]]} of {by[i]} and "
                    f"{NAMES[what]} of {name}; one of them expected"
                )
            if what:
                divided[i], by[i] = what, by[i] or name
    sharding = MeshSharding(mesh, tuple(divided), counts)
    for name, array in arrays.items():
        expected = sharding.placements(patterns[name], tuple(array.shape))
        if tuple(array.placements) != expected:
            raise ValueError(
                f"{owner}: {name} must have the placements {expected} beside "
                f"{', '.join(dict.fromkeys(filter(None, by)))}; found {tuple(array.placements)}"
            )
        for at, size in enumerate(array.shape):
            shards = (i for i, placement in enumerate(expected) if placement.is_shard(at))
            number = prod(map(mesh.size, shards))
            if size % number:
                raise ValueError(
                    f"{owner}: {name} of shape {tuple(array.shape)} is sharded over {number} "
                    f"devices along axis {at}: a multiple of {number} expected"
                )
    return sharding


def _divided_by(
    owner: str, name: str, pattern: Pattern, array: DTensor, placement: Placement, i: int
) -> str:
    if placement.is_replicate():
        return ""
    where = f"{owner}: {name} is {placement} over {_dimension(array.device_mesh, i)}"
    if type(placement) is not Shard:
        raise ValueError(f"{where}: Shard or Replicate expected")
    if placement.dim >= len(pattern.axes):
        return ""  # The call on each device refuses the shape.
    letter = pattern.letters[placement.dim]
    if letter == "b":
        return "b"
    if letter in HEADS and pattern.axes[placement.dim].multiple == 1:
        return "h"
    reason, way_out = "every element of the output depends on all of it", ""
    if letter in "tsc":
        reason = "every token depends on those before it"
        way_out = ", or use precondattn.parallel.torch.context_parallel"
    raise ValueError(
        f"{where}, which divides its axis {placement.dim} ({pattern.axes[placement.dim]}), "
        f"{LETTERS.get(letter, 'of fixed size')}: only batch and heads can be sharded, because "
        f"{reason}; redistribute it first{way_out}"
    )


def _dimension(mesh: DeviceMesh, i: int) -> str:
    names = mesh.mesh_dim_names
    return f"mesh dimension {names[i] if names else i!r}"
