"""The dtype of a leaf's inputs in a divided call in half precision.

Leaves compute in float32 or wider. A leaf that sends no values to other devices reads the float32
results of earlier leaves, as on one device. A leaf that sends values reads them in the call's half
precision, so that half as many bytes are sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from precondattn.algebra.mechanism import leaf_of
from precondattn.arrays import Array, DType, cast, upcast_all
from precondattn.dispatch.discovery import discover

if TYPE_CHECKING:
    from precondattn.algebra.leaf_protocol import LeafCall
    from precondattn.algebra.piece import BackendNames


def inputs_in_half(
    leaf_call: LeafCall,
    inputs: Mapping[str, Array],
    of_call: Collection[str],
    dtype: DType,
    backend: BackendNames,
    *,
    sends_values: bool,
) -> dict[str, Array]:
    """The inputs of a leaf: in `dtype`, or in float32 if it sends none and its backends take that.

    `of_call` are the values of the program that are inputs of the call, and keep their dtype.
    """
    leaf = leaf_of(leaf_call)
    given = {
        name: inputs[name] if value in of_call else cast(inputs[name], dtype)
        for name, value in leaf_call.arguments
    }
    if sends_values:
        return given
    chosen = leaf.explain(**given, backend=backend).backends
    is_wide = all(discover().named(name).wide_values for name in chosen)
    return upcast_all(inputs) if is_wide else given
