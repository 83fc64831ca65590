"""Array libraries without automatic differentiation that write in place: NumPy and CuPy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter

import array_api_compat
import numpy as np

from precondattn.frameworks.framework import INF, Framework, namespace, repeats_entries
from precondattn.frameworks.types import Array, Device, Tree


class NumPy(Framework):
    """NumPy, whose arrays are written to and read at once."""

    reads_at_once = True

    def description(self, array: Array) -> Callable[[Array], Tree]:
        return attrgetter("dtype", "shape")

    def exact_device(self, array: Array) -> str:
        return "cpu"

    def placement(self, array: Array) -> dict[str, Device]:
        return _ON_CPU

    def writes_in_place(self, array: Array, *updates: Array) -> bool:
        return True

    def all_writable(self, arrays: Iterable[Array]) -> bool:
        return False  # Each is asked.

    def writable(self, array: Array) -> Array:
        repeats = repeats_entries(array.shape, array.strides)
        return self.fresh(array) if repeats or not self._may_write(array) else array

    def _may_write(self, array: Array) -> bool:
        return bool(array.flags.writeable)

    def fresh(self, array: Array) -> Array:
        return array.copy(order="K")

    def in_order(self, array: Array) -> Array:
        return array.copy(order="C")

    contiguous = staticmethod(partial(np.asanyarray, order="C"))

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

    def running_maximum(self, array: Array, axis: int) -> Array:
        return namespace(array).maximum.accumulate(array, axis=axis)


class CuPy(NumPy):
    """CuPy, which is NumPy on a CUDA device, and has no read-only arrays."""

    reads_at_once = False

    def description(self, array: Array) -> Callable[[Array], Tree]:
        return self._described

    def device_of(self, array: Array) -> str:
        return "cuda"

    def exact_device(self, array: Array) -> Device:
        return array_api_compat.device(array)

    def placement(self, array: Array) -> dict[str, Device]:
        return {"device": self.exact_device(array)}

    def _may_write(self, array: Array) -> bool:
        return True

    def read_only(self, array: Array) -> Array:
        return array

    def contiguous(self, array: Array) -> Array:
        return array if array.flags.c_contiguous else array.copy(order="C")

    def are_finite(self, array: Array, low: float | None) -> bool:
        return Framework.are_finite(self, array, low)

    def host_integers(self, array: Array) -> list[int] | None:
        return None

    def host_array(self, array: Array) -> Array:
        return array.get()


_ON_CPU = {"device": "cpu"}
