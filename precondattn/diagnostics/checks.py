"""Checks of the arguments of diagnostics: floating-point arrays with given axes."""

from __future__ import annotations

from precondattn.arrays import FLOATING, Array, dtype_name, library_of


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
