"""Checks the loads and stores of Triton's interpreter.

A pointer is an address of 48 bits and, above them, the number of the tensor from which it was
computed. So an access is checked against its own tensor: an access outside of it is an error, even
if it is inside another tensor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from precondattn_kernel_tools import Foreign

if TYPE_CHECKING:
    from torch import Tensor

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ADDRESS_BITS = 48


class OutOfBoundsError(IndexError):
    """The address of an unmasked lane is outside of the tensor from which it was computed."""


class RaceError(RuntimeError):
    """Two programs write different values to the same element, without atomics."""


class Extent:
    """The memory of a tensor of the call, and the programs that wrote to it."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.strides = tuple(tensor.shape), tuple(tensor.stride())
        self.itemsize = tensor.element_size()
        steps = zip(self.shape, self.strides, strict=True)
        last = sum((size - 1) * stride for size, stride in steps)
        # The extent reaches from the first element of a view to the end of its last; the storage
        # may be larger.
        self.first = tensor.data_ptr()
        self.bytes = (last + 1) * self.itemsize if tensor.numel() else 0
        self.writers = np.full(0, -1)

    def __str__(self) -> str:
        return f"a tensor of shape {self.shape} and strides {self.strides}"

    def check(self, addresses: np.ndarray, size: int, verb: str, count: int) -> None:
        """Check that the addresses of a block, of `count` unmasked elements, are in this tensor."""
        offsets = addresses.astype(np.int64) - self.first
        is_outside = (offsets < 0) | (offsets + size > self.bytes)
        if is_outside.any():
            elements = offsets[is_outside] // self.itemsize
            raise OutOfBoundsError(
                f"{elements.size} of {count} elements are {verb} outside of {self}, at offsets "
                f"{elements.min()} to {elements.max()}"
            )

    def note_writer(self, addresses: np.ndarray, is_new: np.ndarray, program: int) -> np.ndarray:
        """Record a write; returns the other programs whose elements it changes."""
        if not self.writers.size:
            self.writers = np.full(self.bytes, -1, dtype=np.int32)
        offsets = addresses.astype(np.int64) - self.first
        before: np.ndarray = self.writers[offsets]
        self.writers[offsets] = program
        others: np.ndarray = before[is_new & (before >= 0) & (before != program)]
        return others


class Watch:
    """The state of the current launch."""

    def __init__(self, seed: int | None) -> None:
        self.random = None if seed is None else np.random.default_rng(seed)
        self.begin()

    def begin(self) -> None:
        """Start a launch, whose tensors and grid are not known yet."""
        self.extents: list[Extent] = []
        self.grid: tuple[int, ...] = ()
        self.order: np.ndarray | None = None
        self.program = 0

    def number(self, tensor: Tensor) -> np.uint64:
        """The tensor's number, to add to the addresses in its pointers."""
        self.extents.append(Extent(tensor))
        return np.uint64(len(self.extents) << ADDRESS_BITS)

    def set_grid(self, grid: tuple[int, ...]) -> None:
        self.grid = grid
        if self.random is not None:
            self.order = self.random.permutation(math.prod(grid))

    def set_program(self, place: tuple[int, ...]) -> tuple[int, ...]:
        """Set the program that runs in place of the one at `place`; returns its position."""
        turn = int(np.ravel_multi_index(place, self.grid))
        self.program = turn if self.order is None else int(self.order[turn])
        return self._place(self.program)

    def addresses(self, pointers: np.ndarray, mask: np.ndarray, size: int, verb: str) -> np.ndarray:
        """The addresses of pointers, after checking that unmasked ones are inside their tensors.

        Raises
        ------
        OutOfBoundsError
            if some are outside, with their number.
        """
        numbers, addresses = _parts(pointers)
        count = int(mask.sum())
        for number in np.unique(numbers[mask]).tolist():
            in_tensor = mask & (numbers == number)
            if not 1 <= number <= len(self.extents):
                raise OutOfBoundsError(
                    f"{in_tensor.sum()} of {count} elements are {verb} at an address that was not "
                    "computed from a tensor of the call"
                )
            self.extents[number - 1].check(addresses[in_tensor], size, verb, count)
        return addresses

    def note_writer(self, pointers: np.ndarray, is_new: np.ndarray, mask: np.ndarray) -> None:
        """Record a write of the current program, which changes the elements where `is_new`.

        Raises
        ------
        RaceError
            if another program wrote one of these elements.
        """
        numbers, addresses = _parts(pointers)
        for number in np.unique(numbers[mask]).tolist():
            in_tensor, extent = mask & (numbers == number), self.extents[number - 1]
            others = extent.note_writer(addresses[in_tensor], is_new[in_tensor], self.program)
            if others.size:
                raise RaceError(
                    f"program {self._place(self.program)} changes {others.size} of the elements "
                    f"that program {self._place(others[0])} has written, of {extent}"
                )

    def _place(self, program: int) -> tuple[int, ...]:
        return tuple(map(int, np.unravel_index(program, self.grid)))


class WatchedMemory:
    """The interpreter's loads and stores, which are checked while there is a watch.

    They support only NumPy's own types, so other types are moved as bits.
    """

    def __init__(self, memory: Foreign) -> None:
        self._memory = memory
        self.watch: Watch | None = None

    def __getattr__(self, name: str) -> Foreign:
        return getattr(self._memory, name)

    def load(
        self, pointers: np.ndarray, mask: np.ndarray, other: object, dtype: np.dtype
    ) -> np.ndarray:
        mask = np.asarray(mask, dtype=bool)
        if self.watch is not None:
            pointers = self.watch.addresses(pointers, mask, dtype.itemsize, "read")
        other = _bits(np.asarray(other, dtype=dtype))
        loaded: np.ndarray = self._memory.load(pointers, mask, other, other.dtype)
        return loaded.view(dtype)

    def store(self, pointers: np.ndarray, value: np.ndarray, mask: np.ndarray) -> object:
        mask, value = np.asarray(mask, dtype=bool), _bits(value)
        if self.watch is not None:
            addresses = self.watch.addresses(pointers, mask, value.dtype.itemsize, "written")
            is_new = value != self._memory.load(addresses, mask, value, value.dtype)
            self.watch.note_writer(pointers, is_new, mask)
            pointers = addresses
        return self._memory.store(pointers, value, mask)

    def atomic_rmw(
        self,
        operation: object,
        pointers: np.ndarray,
        value: np.ndarray,
        mask: np.ndarray,
        order: object,
    ) -> np.ndarray:
        mask = np.asarray(mask, dtype=bool)
        if self.watch is not None:
            pointers = self.watch.addresses(pointers, mask, value.dtype.itemsize, "updated")
        if operation == self._memory.RMW_OP.XCHG:
            old: np.ndarray = self._memory.atomic_rmw(
                operation, pointers, _bits(value), mask, order
            )
            return old.view(value.dtype)
        if value.dtype == BFLOAT16:
            return self._add_bfloat16(pointers, value, mask)
        old = self._memory.atomic_rmw(operation, pointers, value, mask, order)
        return old

    def atomic_cas(
        self, pointers: np.ndarray, expected: np.ndarray, value: np.ndarray, order: object
    ) -> np.ndarray:
        if self.watch is not None:
            mask = np.ones(pointers.shape, dtype=bool)
            pointers = self.watch.addresses(pointers, mask, value.dtype.itemsize, "updated")
        old: np.ndarray = self._memory.atomic_cas(pointers, expected, value, order)
        return old

    def _add_bfloat16(
        self, pointers: np.ndarray, value: np.ndarray, mask: np.ndarray
    ) -> np.ndarray:
        """Triton's only atomic operation on bfloat16. Lanes may share an address."""
        old = np.zeros_like(value)
        lane = np.ones(1, dtype=bool)
        for at in zip(*np.nonzero(mask), strict=True):
            pointer = pointers[at].reshape(1)
            bits = self._memory.load(pointer, lane, np.zeros(1, np.uint16), np.dtype(np.uint16))
            old[at] = bits.view(BFLOAT16)[0]
            self._memory.store(pointer, _bits(bits.view(BFLOAT16) + value[at]), lane)
        return old


def _parts(pointers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the tensors, and the addresses, contained in pointers."""
    numbers = (pointers >> np.uint64(ADDRESS_BITS)).astype(np.int64)
    return numbers, pointers & np.uint64((1 << ADDRESS_BITS) - 1)


def _bits(values: np.ndarray) -> np.ndarray:
    return values.view(f"u{values.dtype.itemsize}")
