"""Array libraries without automatic differentiation that write in place: NumPy and CuPy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter

import numpy as np

from precondattn.frameworks.framework import INF, Framework, namespace, repeats_entries
from precondattn.frameworks.types import Array, Device, Tree


class WritableArrays(Framework):
    """A library whose arrays are written to in place."""

    def writes_in_place(self, array: Array, *updates: Array) -> bool:
        return True

    def all_writable(self, arrays: Iterable[Array]) -> bool:
        return False  # Each is asked.

    def writable(self, array: Array) -> Array:
        repeats = repeats_entries(array.shape, array.strides)
        return self.fresh(array) if repeats or not self._may_write(array) else array

    def _may_write(self, array: Array) -> bool:
        return True

    def fresh(self, array: Array) -> Array:
        return array.copy(order="K")

    def in_order(self, array: Array) -> Array:
        return array.copy(order="C")

    def running_maximum(self, array: Array, axis: int) -> Array:
        return namespace(array).maximum.accumulate(array, axis=axis)


class NumPy(WritableArrays):
    """NumPy, whose arrays are read at once, and may be read-only."""

    reads_at_once = True
    contiguous = staticmethod(partial(np.asanyarray, order="C"))

    def description(self, array: Array) -> Callable[[Array], Tree]:
        return attrgetter("dtype", "shape")

    def exact_device(self, array: Array) -> str:
        return "cpu"

    def placement(self, array: Array) -> dict[str, Device]:
        return _ON_CPU

    def _may_write(self, array: Array) -> bool:
        return bool(array.flags.writeable)

    def are_finite(self, array: Array, low: float | None) -> bool:
        return bool((array < INF).all() if low == -INF else np.isfinite(array).all())

    def read_only(self, array: Array) -> Array:
        view = array.view()
        view.flags.writeable = False
        return view

    def host_integers(self, array: Array) -> list[int] | None:
        integers: list[int] = array.tolist()
        return integers

    def host_array(self, array: Array) -> Array:
        return array


class CuPy(WritableArrays):
    """CuPy, on a CUDA device."""

    def device_of(self, array: Array) -> str:
        return "cuda"

    def contiguous(self, array: Array) -> Array:
        return array if array.flags.c_contiguous else array.copy(order="C")

    def host_array(self, array: Array) -> Array:
        return array.get()


_ON_CPU = {"device": "cpu"}
