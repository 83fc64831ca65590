"""CuPy's rules on NumPy's arithmetic: a stand-in for CuPy on machines without a GPU.

`asarray` moves a NumPy array in, `.get()` moves one out, and nothing else crosses. The arithmetic
is that of `array_api_compat.numpy`, with these differences, which CuPy 14 has too:

* NumPy arrays and lists beside an array, `np.asarray(x)`, `hash(x)`, `hash(x.device)`, and arrays
  as sizes, axes and counts raise a TypeError. Scalars are accepted.
* A reduction and `x[0]` are arrays without axes, and `bool(x)`, `int(x)`, `float(x)` read them.
* `linalg.solve` broadcasts no stacks, and a singular matrix gives NaN.
* An overflow, 0 / 0 and log 0 do not warn.
* An index has one boolean mask at most.

The stand-in is stricter than CuPy where CuPy accepts a mistake: lists and NumPy arrays as an index
(CuPy copies them to the device), an assignment that names an element twice, NumPy's own functions,
array methods such as `x.sum()`, and vectors as the right-hand side of a stack of matrices. Not
imitated: integer indices out of bounds, and names that CuPy lacks, which array_api_strict detects.
"""

from __future__ import annotations

import functools
import operator
import types
from typing import Any

import array_api_compat.numpy as host_namespace
import numpy as np

SCALARS = (bool, int, float, complex, np.generic)


class StandInDevice:
    """The one device. Devices are compared, never hashed: like CuPy's, it has no `__hash__`."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StandInDevice)

    def __repr__(self) -> str:
        return "<stand-in for CUDA Device 0>"


class StandInArray:
    """A NumPy array that behaves like one of CuPy's."""

    __array_ufunc__ = None  # NumPy's operators then defer to the methods of this class.
    __hash__ = None

    def __init__(self, data: np.ndarray) -> None:
        assert type(data) is np.ndarray, "use asarray"
        self._data = data

    dtype = property(lambda self: self._data.dtype)
    shape = property(lambda self: self._data.shape)
    ndim = property(lambda self: self._data.ndim)
    size = property(lambda self: self._data.size)
    T = property(lambda self: StandInArray(self._data.T))
    mT = property(lambda self: StandInArray(self._data.mT))  # noqa: N815
    device = property(lambda self: StandInDevice())

    def __array_namespace__(self, api_version: str | None = None) -> Namespace:
        return namespace

    def get(self) -> np.ndarray:
        """The explicit transfer out: a copy."""
        return self._data.copy()

    def copy(self, order: str = "C") -> StandInArray:
        return StandInArray(self._data.copy(order))

    def __repr__(self) -> str:
        return f"cupy_stand_in.{self._data!r}"

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def __array_function__(self, function: Any, *_: Any) -> Any:
        raise TypeError(f"np.{function.__name__} was given an array that is not NumPy's")

    def __bool__(self) -> bool:
        return bool(self._data)

    def __int__(self) -> int:
        return int(self._data)

    def __float__(self) -> float:
        return float(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> StandInArray:
        return StandInArray(self._data[_index(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        index = _index(index)
        written = np.arange(self.size).reshape(self.shape)[index]
        if np.unique(written).size < written.size:
            raise ValueError("x[index] = … names an element twice; CuPy may store either value")
        self._data[index] = _operand(value)


def _index(index: Any) -> tuple[Any, ...]:
    """The index for NumPy, with an ellipsis, under which NumPy never returns a scalar."""
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        whole = isinstance(part, int | np.integer) and not isinstance(part, bool)
        if not (whole or part is None or part is ... or isinstance(part, slice | StandInArray)):
            raise TypeError(f"an index of {type(part)} would be copied to the device: use asarray")
    if sum(isinstance(part, StandInArray) and part.dtype == bool for part in parts) > 1:
        raise IndexError("CuPy does not support more than one boolean mask in an index")
    actual = tuple(part._data if isinstance(part, StandInArray) else part for part in parts)
    return actual if any(part is ... for part in parts) else (*actual, ...)


def _operand(value: Any) -> Any:
    """An array or a scalar, for NumPy."""
    if isinstance(value, StandInArray):
        return value._data
    if isinstance(value, SCALARS):
        return value
    raise TypeError(f"Unsupported type {type(value)}")


def _argument(value: Any) -> Any:
    """A positional argument that is, or may be, an array: or a sequence of arrays."""
    if isinstance(value, list | tuple):
        if not all(isinstance(each, StandInArray) for each in value):
            raise TypeError(f"Unsupported type {type(value)}, unless all in it are arrays")
        return [each._data for each in value]
    return value if value is None or isinstance(value, type | np.dtype) else _operand(value)


def _keyword(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        raise TypeError(f"{name}: Unsupported type {type(value)}")
    return value._data if isinstance(value, StandInArray) and name != "axis" else value


def _result(value: Any) -> Any:
    """The result of NumPy, with arrays and scalars moved to the device."""
    if isinstance(value, np.ndarray | np.generic):
        return StandInArray(np.asarray(value))
    if isinstance(value, list | tuple):
        results = map(_result, value)
        return type(value)(*results) if hasattr(value, "_fields") else tuple(results)
    return value


def _checked_device(device: Any) -> None:
    if not (device is None or isinstance(device, StandInDevice)):
        raise ValueError(f"device must be that of an array, or None; found {device!r}")


# Sizes and counts are passed to NumPy unchanged: an array among them raises, as it has no
# `__index__`.
WITHOUT_ARRAYS = frozenset(
    ("arange", "broadcast_shapes", "empty", "eye", "full", "linspace", "ones", "zeros")
)
ONE_ARRAY_FIRST = frozenset(
    ("astype", "broadcast_to", "expand_dims", "flip", "moveaxis", "permute_dims", "repeat")
) | frozenset(("reshape", "roll", "squeeze", "tile"))
OF_DTYPES = frozenset(("can_cast", "finfo", "iinfo", "isdtype", "result_type"))
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
BITWISE = ("and", "or", "xor", "lshift", "rshift")
COMPARISONS = ("lt", "le", "eq", "ne", "gt", "ge")
UNARY = ("neg", "pos", "abs", "invert")


class Namespace:
    """A namespace of the array API: NumPy's functions under CuPy's rules."""

    def __init__(self, name: str, numpys: types.ModuleType) -> None:
        self.__name__ = name
        self._numpys = numpys

    def __repr__(self) -> str:
        return f"<namespace {self.__name__}>"

    def __getattr__(self, name: str) -> Any:
        actual = getattr(self._numpys, name)
        if isinstance(actual, types.ModuleType):
            raise AttributeError(f"{self.__name__} has no {name}")
        return actual if isinstance(actual, type) or not callable(actual) else _ruled(name, actual)


def _ruled(name: str, function: Any) -> Any:
    """NumPy's function under CuPy's rules."""

    @functools.wraps(function)
    def checked(*arguments: Any, device: Any = None, **keywords: Any) -> Any:
        _checked_device(device)
        keywords = {key: _keyword(key, value) for key, value in keywords.items()}
        if name in WITHOUT_ARRAYS:
            given = list(arguments)
        elif name in ONE_ARRAY_FIRST:
            given = [arguments[0]._data if isinstance(arguments[0], StandInArray) else None]
            given += arguments[1:]
        else:
            given = [_argument(argument) for argument in arguments]
        if name not in WITHOUT_ARRAYS | OF_DTYPES:
            # Either operand of a ufunc may be a scalar; other functions need an array as the first.
            places = given if isinstance(function, np.ufunc) else given[:1]
            if not any(isinstance(each, np.ndarray | list) for each in places):
                raise TypeError(f"{name} needs an array; found {[type(a) for a in arguments]}")
        with np.errstate(all="ignore"):
            return _result(function(*given, **keywords))

    return checked


def asarray(obj: Any, /, *, dtype: Any = None, device: Any = None, copy: bool | None = None) -> Any:
    """An array on the device: the explicit transfer in of scalars, lists and NumPy arrays."""
    _checked_device(device)
    if not isinstance(obj, StandInArray):
        if copy is False:
            raise ValueError("Unable to avoid copy while creating an array as requested")
        return StandInArray(np.array(obj, dtype=dtype))
    return StandInArray(host_namespace.asarray(obj._data, dtype=dtype, copy=copy))


def solve(a: StandInArray, b: StandInArray, /) -> StandInArray:
    """x with a x = b, for stacks (…, m, m) and (…, m, k) of equal batch shape."""
    if a.ndim != b.ndim or a.shape[:-1] != b.shape[:-1]:
        raise ValueError(
            f"a must have shape (..., M, M) and b (..., M, K); found {a.shape} and {b.shape}"
        )
    try:
        return StandInArray(host_namespace.linalg.solve(_operand(a), _operand(b)))
    except np.linalg.LinAlgError:
        return namespace.full_like(b, float("nan"))


namespace = Namespace("cupy_stand_in", host_namespace)
namespace.asarray = asarray
namespace.linalg = Namespace("cupy_stand_in.linalg", host_namespace.linalg)
namespace.linalg.solve = solve
namespace.fft = Namespace("cupy_stand_in.fft", host_namespace.fft)


def _operator(apply: Any, *, reflected: bool = False, in_place: bool = False) -> Any:
    def method(self: StandInArray, *other: Any) -> StandInArray:
        operands = (*other, self) if reflected else (self, *other)
        with np.errstate(all="ignore"):
            result = _result(apply(*map(_operand, operands)))
        return self if in_place else result

    return method


for _name in UNARY + COMPARISONS:
    setattr(StandInArray, f"__{_name}__", _operator(getattr(operator, f"__{_name}__")))
for _name in ARITHMETIC + BITWISE:
    _apply, _apply_in_place = (getattr(operator, f"__{i}{_name}__") for i in ("", "i"))
    setattr(StandInArray, f"__{_name}__", _operator(_apply))
    setattr(StandInArray, f"__r{_name}__", _operator(_apply, reflected=True))
    setattr(StandInArray, f"__i{_name}__", _operator(_apply_in_place, in_place=True))
