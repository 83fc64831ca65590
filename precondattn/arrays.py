"""Functions of arrays of any library, and names for types.

A function without a docstring calls the method of the same name of the array's framework, which
`frameworks/framework.py` documents.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from precondattn.frameworks import of
from precondattn.frameworks.framework import TIME as TIME
from precondattn.frameworks.framework import namespace as namespace
from precondattn.frameworks.types import Array as Array
from precondattn.frameworks.types import Arrays as Arrays
from precondattn.frameworks.types import ByName as ByName
from precondattn.frameworks.types import Device as Device
from precondattn.frameworks.types import DType as DType
from precondattn.frameworks.types import Index as Index
from precondattn.frameworks.types import Namespace as Namespace
from precondattn.frameworks.types import Residuals as Residuals
from precondattn.frameworks.types import Shape as Shape
from precondattn.frameworks.types import Step as Step
from precondattn.frameworks.types import Token as Token
from precondattn.frameworks.types import Tree as Tree

F = TypeVar("F", bound=Callable[..., object])

HALF = frozenset({"float16", "bfloat16"})
FLOATING = HALF | {"float32", "float64"}

DIFFERENTIATING = frozenset({"torch", "jax"})

_names: dict[DType, str] = {}
_wide: set[tuple[type, DType]] = set()
"""Pairs of an array type and a dtype that is not half precision."""


def library_of(array: Array) -> str | None:
    """The name of the library of `array`, or None if it is not an array."""
    return of(array).name


def dtype_name(array: Array) -> str:
    """The name of an array's dtype, such as `"float32"`, the same in every library."""
    # The key includes the type, because dtypes of different libraries may not be comparable.
    key = type(array), array.dtype
    name = _names.get(key)
    if name is None:
        name = _names[key] = str(array.dtype).rpartition(".")[2]
    return name


def upcast(array: Array) -> Array:
    """A half-precision array in float32; any other array unchanged."""
    kind = type(array), array.dtype
    if kind in _wide:
        return array
    if dtype_name(array) in HALF:
        xp = namespace(array)
        return xp.astype(array, xp.float32)
    _wide.add(kind)
    return array


def upcast_all(arrays: ByName) -> dict[str, Array]:
    """The arrays, with those in half precision converted to float32."""
    wide = {}
    for name, array in arrays.items():
        wide[name] = array if (type(array), array.dtype) in _wide else upcast(array)
    return wide


def cast(array: Array, dtype: DType) -> Array:
    """The array in `dtype`; the same array if it has that dtype."""
    return array if array.dtype == dtype else namespace(array).astype(array, dtype)


def _method(name: str) -> Callable[..., Tree]:
    """The method of this name of the framework of the first argument, as a function."""

    def call(array: Array, *others: Tree, **named: Tree) -> Tree:
        return getattr(of(array), name)(array, *others, **named)

    return call


device_of: Callable[[Array], str] = _method("device_of")
exact_device: Callable[[Array], Device] = _method("exact_device")
placement: Callable[[Array], dict[str, Device]] = _method("placement")
is_traced: Callable[[Array], bool] = _method("is_traced")
has_only_a_shape: Callable[[Array], bool] = _method("has_only_a_shape")
is_captured: Callable[[Array], bool] = _method("is_captured")
is_ordinary: Callable[[Array], bool] = _method("is_ordinary")
wants_gradient: Callable[..., bool] = _method("wants_gradient")
transforms_of: Callable[..., frozenset[str]] = _method("transforms_of")
writes_in_place: Callable[..., bool] = _method("writes_in_place")
fresh: Callable[[Array], Array] = _method("fresh")
in_order: Callable[[Array], Array] = _method("in_order")
contiguous: Callable[[Array], Array] = _method("contiguous")
host_integers: Callable[[Array], list[int] | None] = _method("host_integers")
host_array: Callable[[Array], Array] = _method("host_array")
on_device_of: Callable[[Array, Array], Array] = _method("on_device_of")
stop_gradient: Callable[[Array], Array] = _method("stop_gradient")
take_tokens: Callable[[Array, Array], Array] = _method("take_tokens")
gathered: Callable[..., Array] = _method("gathered")
split_rows: Callable[[Array, Sequence[int]], list[Array]] = _method("split_rows")
as_index: Callable[[Array], Array] = _method("as_index")
sort: Callable[..., Array] = _method("sort")
nonempty: Callable[..., Array] = _method("nonempty")
cholesky: Callable[[Array], Array] = _method("cholesky")
solve_triangular: Callable[..., Array | None] = _method("solve_triangular")
running_maximum: Callable[..., Array] = _method("running_maximum")
linear_scan: Callable[..., Array] = _method("linear_scan")


def scan(step: Step, state: Array, inputs: Token, *, reverse: bool = False) -> tuple[Array, Array]:
    return of(state).scan(step, state, inputs, reverse=reverse)


def vjp(function: Step, arrays: Sequence[Array], cotangents: Sequence[Array]) -> tuple[Array, ...]:
    return of(arrays[0]).vjp(function, arrays, cotangents)


def is_distributed(arrays: Iterable[Array], named: ByName, *others: object) -> bool:
    """Whether one of the arguments is a DTensor."""
    return any(of(each).is_distributed for each in (*arrays, *named.values(), *others))


def is_compiling() -> bool:
    """Whether `torch.compile` is tracing."""
    # While another thread imports PyTorch, the module does not have its names yet.
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and bool(compiler.is_compiling())


def is_traced_by_dynamo() -> bool:
    """Whether `torch.compile` is tracing this line instead of running it."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and bool(compiler.is_dynamo_compiling())


def arange_like(n: int, array: Array) -> Array:
    """0, 1, … n − 1 as int32, on the device of `array`."""
    xp = namespace(array)
    return xp.arange(n, dtype=xp.int32, **placement(array))


def differs_from_previous(ids: Array) -> Array:
    """Whether each id (b, t) differs from the one before it; False for the first."""
    xp, token = namespace(ids), arange_like(ids.shape[1], ids)
    # With slices of t − 1 tokens, PyTorch could not export a program that also takes one token.
    previous = xp.where(token > 0, token - 1, 0)
    return ids != xp.take(ids, as_index(previous), axis=1)


def zero_where_not(mask: Array, array: Array) -> Array:
    """`array` where `mask` is true, else 0; masked NaN and infinities become 0 too."""
    masked = namespace(array).where(mask, array, 0.0)
    return cast(masked, array.dtype)  # NumPy promotes bfloat16 to float64.


def is_finite_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # An integer beyond the range of a float.
        return False
