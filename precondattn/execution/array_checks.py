"""Checks of input arrays: one library, one device, and compatible dtypes."""

from __future__ import annotations

from precondattn.algebra.declaration import Inputs
from precondattn.arrays import FLOATING, HALF, dtype_name, exact_device, library_of
from precondattn.backend import UnsupportedError
from precondattn.frameworks import of
from precondattn.frameworks.types import Array, ByName


def check_arrays(owner: str, declared: Inputs, inputs: ByName) -> str:
    """Raise an error unless the inputs have one library, one device and compatible dtypes.

    Returns the name of the library. If queries, keys and values are in half precision, other inputs
    may be in float32.
    """
    libraries = {}
    for name, array in inputs.items():
        check_stored(
            f"{owner}: {name}",
            array,
            of_nested=f"use torch.nested.to_padded_tensor({name}, 0.0), and give "
            f"lengths=[len(x) for x in {name}.unbind()]",
        )
        libraries[name] = str(library_of(array))
    if any(of(array).is_recorded_by_jit() for array in inputs.values()):
        raise UnsupportedError(
            f"{owner}: torch.jit.trace would record the call for one number of tokens; use "
            f"torch.export or torch.compile"
        )
    if len(set(libraries.values())) > 1:
        raise TypeError(f"{owner}: inputs of one library expected; found {libraries}")
    devices = {name: exact_device(array) for name, array in inputs.items()}
    comparable = {name: device for name, device in devices.items() if device is not None}
    # Compared without a set, because CuPy's devices are not hashable.
    expected_device = next(iter(comparable.values()), None)
    if any(device != expected_device for device in comparable.values()):
        names = {name: str(device) for name, device in comparable.items()}
        raise ValueError(f"{owner}: inputs on one device expected; found {names}")
    dtypes = {name: dtype_name(array) for name, array in inputs.items()}
    for name, dtype in dtypes.items():
        if dtype not in FLOATING:
            raise TypeError(
                f"{owner}: {name} must be of dtype float16, bfloat16, float32 or float64; "
                f"found {dtype}"
            )
    expected = call_dtype(inputs)
    for name, dtype in dtypes.items():
        is_wide_gate = expected in HALF and dtype == "float32" and not declared[name].is_rows
        if dtype != expected and not is_wide_gate:
            raise TypeError(
                f"{owner}: inputs of one dtype expected (beside half-precision queries, keys "
                f"and values, gates and the like may be float32); found {dtypes}"
            )
    return next(iter(libraries.values()))


def check_stored(what: str, array: Array, *, of_nested: str = "give a dense tensor") -> None:
    """Raise a TypeError for what lacks an entry for some index, such as a sparse tensor."""
    if library_of(array) is None:
        raise TypeError(
            f"{what} must be an array of NumPy, PyTorch, JAX, CuPy or another array-API library; "
            f"found {type(array).__name__}"
        )
    storage = of(array).storage_of(array)
    if storage == "nested":
        raise TypeError(f"{what} is a nested tensor, which is not supported; {of_nested}")
    if storage is not None:
        kind = "sparse tensor" if storage.startswith("sparse") else "tensor"
        raise TypeError(
            f"{what} is a {kind} of layout {storage}, which is not supported; use its to_dense()"
        )


def check_device(what: str, array: Array, like: Array, hint: str = "") -> None:
    """Raise a ValueError for an array on another device than the inputs, where both are known."""
    device, expected = exact_device(array), exact_device(like)
    if None not in (device, expected) and device != expected:
        raise ValueError(f"{what} is on {device}; the inputs are on {expected}{hint}")


def values_of(inputs: ByName) -> Array:
    """The input whose dtype the output has: v, or the first input if there is no v."""
    return inputs["v"] if "v" in inputs else next(iter(inputs.values()))


def call_dtype(inputs: ByName) -> str:
    """The name of the dtype of the call's output."""
    return dtype_name(values_of(inputs))


def check_cotangent(owner: str, what: str, cotangent: Array, whose: str, array: Array) -> None:
    """Raise an error unless a cotangent has the library, shape and dtype of its array."""
    library = library_of(array)
    if library_of(cotangent) != library:
        raise TypeError(
            f"{owner}: {what} must be an array of {library}, as {whose}; "
            f"found {type(cotangent).__name__}"
        )
    check_stored(f"{owner}: {what}", cotangent)
    shape, dtype = tuple(array.shape), dtype_name(array)
    if tuple(cotangent.shape) != shape or dtype_name(cotangent) != dtype:
        raise ValueError(
            f"{owner}: {what} must have {whose}'s shape {shape} and dtype {dtype}; "
            f"found {tuple(cotangent.shape)} and {dtype_name(cotangent)}"
        )
