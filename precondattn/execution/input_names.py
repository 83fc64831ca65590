"""The names of inputs: which are declared, and which of them the arguments of a call are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from precondattn.algebra.declaration import Inputs
from precondattn.algebra.piece import Piece
from precondattn.algebra.text import nearest
from precondattn.arrays import Array, ByName
from precondattn.limits import KEPT


@lru_cache(maxsize=KEPT)
def declared_inputs(mechanism: Piece) -> Inputs:
    return mechanism.inputs


@lru_cache(maxsize=KEPT)
def extending_inputs(mechanism: Piece) -> Inputs:
    """The inputs of `extend`."""
    return mechanism.inputs.extending()


MASKS = ("segment_ids", "cu_seqlens", "lengths", "key_mask")
CALL_OPTIONS = (*MASKS, "backend")
"""Keywords of a call that are not inputs."""

EXTEND_OPTIONS = ("lengths", "key_mask", "donate", "backend")
INIT_OPTIONS = ("capacity", "key_mask")


def inputs_by_name(
    owner: str,
    declared: Inputs,
    arrays: Sequence[Array],
    named: ByName,
    options: Sequence[str],
    *,
    complete: bool = True,
) -> dict[str, Array]:
    """The inputs in the declared order; those that are given, unless `complete`."""
    takes = f"{owner} takes {', '.join(declared)}"
    if len(arrays) > min(3, len(declared)):
        raise TypeError(
            f"{takes}: at most {min(3, len(declared))} by position, the others by name; "
            f"found {len(arrays)} by position"
        )
    given = dict(zip(declared, arrays, strict=False))
    for name, array in named.items():
        if name in given:
            raise TypeError(f"{owner}: {name} is given by position and by name")
        if name not in declared:
            hint = nearest(name, [*declared, *options])
            raise TypeError(
                f"{owner}: unknown keyword {name!r}{hint}; {takes}, and {', '.join(options)}"
            )
        given[name] = array
    missing = [name for name in declared if name not in given]
    if missing and complete:
        raise TypeError(f"{owner}: missing {', '.join(missing)}; {takes}")
    return {name: given[name] for name in declared if name in given}


def shapes_of(inputs: ByName) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in inputs.items()}
