"""The arguments of a kernel: NumPy arrays for pointers, NumPy scalars by value.

Types are checked strictly, because on a GPU a kernel with an `int` parameter would read four bytes
of an eight-byte integer.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

try:
    import ml_dtypes
except ModuleNotFoundError as missing:
    raise ImportError(
        "bfloat16 on a CPU needs ml_dtypes: pip install 'precondattn[kernels]'"
    ) from missing

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ALIGNMENT = 256
"""The alignment of an allocated array's first byte on a GPU."""


class KernelParameter(NamedTuple):
    """A parameter of a kernel: a number, or a pointer to such numbers."""

    is_pointer: bool
    is_constant: bool
    letter: str
    size: int

    def __str__(self) -> str:
        kinds = {"v": "void", "x": f"a structure of {self.size} bytes", "t": "bool"}
        words = {"f": "floating-point", "b": "bfloat16", "i": "signed", "u": "unsigned"}
        kind = kinds.get(self.letter) or f"{words[self.letter]} of {8 * self.size} bits"
        return f"a pointer to {kind}" if self.is_pointer else kind

    def accepts(self, dtype: np.dtype) -> bool:
        if self.letter == "b":
            return bool(dtype == BFLOAT16)
        if self.letter == "x":
            return self.is_pointer or dtype.itemsize == self.size
        if self.is_pointer and (self.letter == "v" or (self.letter, self.size) == ("u", 1)):
            return True  # The kernel casts bytes to another type.
        kinds = {"f": "f", "i": "i", "u": "u", "t": "b"}
        return dtype.kind == kinds[self.letter] and dtype.itemsize == self.size


def parameters(signature: str) -> list[KernelParameter]:
    """Parameters from a signature: "*cf4 *f4 i4" means const float*, float*, int."""
    parsed = []
    for word in signature.split():
        parts = re.fullmatch(r"(\*?)(c?)(\w)(\d+)", word)
        assert parts is not None, word
        parsed.append(KernelParameter(bool(parts[1]), bool(parts[2]), parts[3], int(parts[4])))
    return parsed


class RuntimeArray(ctypes.Structure):
    """The struct `Array` of runtime.h."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("granule", ctypes.c_size_t),
        ("alignment", ctypes.c_size_t),
        ("name", ctypes.c_char * 128),
    )


class LaunchArguments:
    """The arguments of one launch, as the runtime needs them.

    Raises
    ------
    TypeError, ValueError
        with the argument, the expected type and the one that was passed.
    """

    def __init__(
        self, kernel: str, wanted: Sequence[KernelParameter], args: Sequence[object]
    ) -> None:
        if len(args) != len(wanted):
            raise TypeError(f"{kernel} takes {len(wanted)} arguments, and args has {len(args)}")
        self._kept: list[ctypes.c_void_p | ctypes.Array[ctypes.c_char]] = []
        arrays: list[tuple[int, np.ndarray]] = []
        for i, (parameter, value) in enumerate(zip(wanted, args, strict=True)):
            if parameter.is_pointer:
                self._kept.append(ctypes.c_void_p(None))
                if value is not None:
                    arrays.append((i, _array(f"args[{i}] of {kernel}", parameter, value)))
            else:
                data = _by_value(f"args[{i}] of {kernel}", parameter, value)
                self._kept.append(ctypes.create_string_buffer(data, len(data)))
        self.pointers = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, self._kept))
        self._place(arrays)

    def _place(self, arrays: Sequence[tuple[int, np.ndarray]]) -> None:
        """Place arrays such that those that share memory share it in the kernel too."""
        extents = sorted((*np.lib.array_utils.byte_bounds(x), i, x) for i, x in arrays)
        groups: list[list[int]] = []
        names: list[str] = []
        places, offsets = [], []
        for low, high, i, x in extents:
            high = high if x.size else low
            name = f"args[{i}], {x.dtype} of shape {x.shape}"
            if groups and low < groups[-1][1]:
                group = groups[-1]
                group[1] = max(group[1], high)
                group[2] = min(group[2], x.itemsize)
                names[-1] += f", and {name}"
            else:
                base = x
                while isinstance(base.base, np.ndarray):
                    base = base.base
                shift = low - np.lib.array_utils.byte_bounds(base)[0]
                groups.append([low, high, x.itemsize, shift % ALIGNMENT])
                names.append(name)
            places += [i, len(groups) - 1]
            # The pointer of a view with negative strides is that of its first element.
            offsets.append(x.__array_interface__["data"][0] - groups[-1][0])
        self.arrays = (RuntimeArray * len(groups))()
        for group, name, array in zip(groups, names, self.arrays, strict=True):
            low, high, array.granule, array.alignment = group
            array.memory, array.bytes = low, high - low
            array.name = name.encode()[:127]
        self.places = (ctypes.c_int * len(places))(*places)
        self.offsets = (ctypes.c_size_t * len(offsets))(*offsets)


def _array(name: str, parameter: KernelParameter, value: object) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name} has to be an array for {parameter}, not {type(value).__name__}")
    if not parameter.accepts(value.dtype):
        raise TypeError(f"{name} is {parameter}, and the array has {value.dtype}")
    if not parameter.is_constant and not value.flags.writeable:
        raise ValueError(f"{name} may be written by the kernel, and the array is read-only")
    return value


def _by_value(name: str, parameter: KernelParameter, value: object) -> bytes:
    # Python numbers are converted as in CuPy.
    if isinstance(value, bool | int | float) and not isinstance(value, np.generic):
        value = np.asarray(value)[()]
    if not isinstance(value, np.generic):
        raise TypeError(f"{name} has to be a number for {parameter}, not {type(value).__name__}")
    if not parameter.accepts(value.dtype):
        raise TypeError(
            f"{name} is {parameter}, and a value of {value.dtype} is given: pass a NumPy scalar "
            "of the kernel's type"
        )
    return value.tobytes()
