"""Moving the rows of an array to other places, and back, which is the gradient of moving them.

moved:   y[i] = x[source_i]   where row i of y has a source, else 0
back:    dx[j] = dy[slot_j]   where row j of x was moved, else 0
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn.arrays import (
    Array,
    library_of,
    namespace,
    on_device_of,
    wants_gradient,
    zero_where_not,
)


class MovedRows(NamedTuple):
    """Where each row comes from. No row is moved to two places that have a source."""

    sources: Array
    has_source: Array
    """None where all have."""
    slots: Array
    """Where each row goes to."""
    is_moved: Array
    """None where all are."""

    @property
    def back(self) -> MovedRows:
        return MovedRows(self.slots, self.is_moved, self.sources, self.has_source)

    def on_device_of(self, like: Array) -> MovedRows:
        return MovedRows(*(None if a is None else on_device_of(like, a) for a in self))


def moved(array: Array, rows: MovedRows) -> Array:
    """The rows (first axis) of an array, moved."""
    if library_of(array) == "torch" and wants_gradient(array):
        from precondattn.execution.torch.moved_rows import differentiable

        return differentiable(array, rows)
    return taken(array, rows)


def taken(array: Array, rows: MovedRows) -> Array:
    xp = namespace(array)
    result = xp.take(array, rows.sources, axis=0)
    if rows.has_source is None:
        return result
    shape = (-1, *(1,) * (array.ndim - 1))
    has_source = xp.reshape(rows.has_source, shape)
    if result.dtype == xp.bool:
        return result & has_source
    return zero_where_not(has_source, result)
