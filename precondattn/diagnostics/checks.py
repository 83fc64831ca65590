"""Checks of the arguments of diagnostics: arrays with given axes, and the arguments of a call."""

from __future__ import annotations

from precondattn.algebra.mechanism import Mechanism
from precondattn.arrays import (
    FLOATING,
    Array,
    Arrays,
    dtype_name,
    is_traced,
    library_of,
    upcast,
)
from precondattn.given import Given


def check_floating(name: str, array: Array, axes: str) -> None:
    """Raise an error unless `array` is a floating-point array with these axes.

    `axes` names them, as in "(b, s, n, d)". If it begins with "(…", more axes may come first.
    """
    from precondattn.execution.array_checks import check_stored

    check_stored(name, array)
    if dtype_name(array) not in FLOATING:
        raise TypeError(f"{name} must be of a floating dtype; found {dtype_name(array)}")
    letters = axes.strip("()").split(", ")
    is_open = letters[0] == "..."
    least = len(letters) - is_open
    if array.ndim < least or (array.ndim > least and not is_open):
        raise ValueError(f"{name} must be an array {axes}; found shape {tuple(array.shape)}")


def check_like(name: str, array: Array, k: Array, axes: str, shape: tuple[int, ...]) -> None:
    """Raise an error unless `array` is an array of the library of k with this shape.

    `axes` names the axes in the message.
    """
    if library_of(array) != library_of(k):
        raise TypeError(
            f"{name} must be an array of {library_of(k)}, as k; found {type(array).__name__}"
        )
    if tuple(array.shape) != shape:
        raise ValueError(
            f"{name} must have the shape {axes} = {shape}; found shape {tuple(array.shape)}"
        )


def examined_inputs(
    what: str, mechanism: Mechanism, arrays: tuple[Array, ...], named: dict[str, Given]
) -> tuple[Arrays, dict[str, Given]]:
    """The inputs by name, in float32 instead of half precision, and the masks and the backend.

    Raises
    ------
    TypeError
        if `mechanism` is not a mechanism, or if an input is missing, unknown, not an array, or
        traced.
    """
    from precondattn.execution.input_names import CALL_OPTIONS, inputs_by_name

    if not isinstance(mechanism, Mechanism):
        raise TypeError(
            f"{what}: a mechanism, such as pa.Lucid(), is expected; found {mechanism!r}"
        )
    options = {name: named[name] for name in CALL_OPTIONS if name in named}
    by_name = {name: array for name, array in named.items() if name not in options}
    inputs = inputs_by_name(str(mechanism), mechanism.inputs, arrays, by_name, CALL_OPTIONS)
    for name, array in inputs.items():
        if library_of(array) is None:
            raise TypeError(f"{mechanism}: {name} must be an array; found {type(array).__name__}")
        if is_traced(array):
            raise TypeError(
                f"{what}: {name} is traced, and its entries can not be read; call it outside of "
                f"jit, compile, vmap and grad"
            )
    return {name: upcast(array) for name, array in inputs.items()}, options
