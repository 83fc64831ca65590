"""The declared inputs of a mechanism, and the arguments of a call by input name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from precondattn.algebra.declaration import Inputs
from precondattn.algebra.piece import Piece
from precondattn.algebra.text import hint_at_keyword, plain
from precondattn.arrays import Array, ByName
from precondattn.limits import KEPT


@lru_cache(maxsize=KEPT)
def declared_inputs(mechanism: Piece) -> Inputs:
    return mechanism.inputs


MASKS = ("segment_ids", "cu_seqlens", "lengths", "key_mask", "prefix", "attn_mask")
CALL_OPTIONS = (*MASKS, "backend")

EXTEND_OPTIONS = (*MASKS, "donate", "keep", "states_every", "backend")
EXTEND_VJP_OPTIONS = ("segment_ids", "cu_seqlens", "lengths", "key_mask", "backend")
INIT_OPTIONS = ("capacity", "key_mask", "states", "sequences")


def inputs_by_name(
    owner: str,
    declared: Inputs,
    arrays: Sequence[Array],
    named: ByName,
    options: Sequence[str],
    *,
    complete: bool = True,
) -> dict[str, Array]:
    """The inputs in the declared order; without `complete`, some may be missing."""
    takes, positional = f"{owner} takes {', '.join(declared)}", min(3, len(declared))
    if len(arrays) > positional:
        call = ", ".join(name if i < 3 else f"{name}={name}" for i, name in enumerate(declared))
        example = f", as in ({call})" if len(declared) > positional else ""
        raise TypeError(
            f"{takes}: at most {positional} by position, the others by name{example}; "
            f"found {len(arrays)} by position"
        )
    by_name = dict(zip(declared, arrays, strict=False))
    for name, array in named.items():
        if name in by_name:
            raise TypeError(f"{owner}: {name} is given by position and by name")
        if name not in declared:
            hint = hint_at_keyword(owner, name, plain(array), [*declared, *options])
            raise TypeError(
                f"{owner}: unknown keyword {name!r}{hint}; {takes}, and {', '.join(options)}"
            )
        by_name[name] = array
    missing = [name for name in declared if name not in by_name]
    if missing and complete:
        raise TypeError(f"{owner}: missing {', '.join(missing)}; {takes}")
    return {name: by_name[name] for name in declared if name in by_name}


def shapes_of(inputs: ByName) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in inputs.items()}
