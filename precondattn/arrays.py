"""What is known about the array libraries, in one place.

No other module names a framework, except those that connect to its autograd
(`execution/autograd_*.py`), and none is imported here: a library is
recognised by the arrays it made, and its module is then already loaded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import array_api_compat

Array = Any
"""An array of any supported library."""

Arrays = dict[str, Array]
"""Arrays by name."""

Residuals = tuple[Array, ...]
"""What a forward pass saves for its gradient, besides inputs and output."""

Shape = tuple[int, ...]

HALF = frozenset({"float16", "bfloat16"})
FLOATING = HALF | {"float32", "float64"}


_library_of_type: dict[type, str | None] = {}
_namespace_of_type: dict[type, Any] = {}
_names: dict[Any, str] = {}


def library_of(array: Array) -> str | None:
    """The name of the library that made `array`, or None when it is not an array."""
    kind = type(array)
    if kind not in _library_of_type:
        _library_of_type[kind] = _recognise(array)
    return _library_of_type[kind]


def _recognise(array: Array) -> str | None:
    if array_api_compat.is_numpy_array(array):
        # A masked array is a subclass that hides values, which nothing here would respect.
        return None if hasattr(array, "mask") else "numpy"
    if array_api_compat.is_torch_array(array):
        return "torch"
    if array_api_compat.is_jax_array(array):
        return "jax"
    if array_api_compat.is_cupy_array(array):
        return "cupy"
    if hasattr(array, "__array_namespace__"):
        name: str = array.__array_namespace__().__name__
        return name.partition(".")[0]
    return None


def namespace(*arrays: Array | None) -> Any:
    """The array-API namespace of the arrays; None is passed over."""
    first = next(array for array in arrays if array is not None)
    kind = type(first)
    if kind not in _namespace_of_type:
        found = array_api_compat.array_namespace(*(a for a in arrays if a is not None))
        if library_of(first) is None:
            return found
        _namespace_of_type[kind] = found
    return _namespace_of_type[kind]


def dtype_name(array: Array) -> str:
    """`"float32"` for every library's float32."""
    # With the type, because dtypes of some libraries do not bear comparison with those of others.
    key = type(array), array.dtype
    if key not in _names:
        _names[key] = str(array.dtype).rpartition(".")[2]
    return _names[key]


def upcast(array: Array) -> Array:
    """A half-precision array in float32; any other array as it is."""
    if dtype_name(array) in HALF:
        xp = namespace(array)
        return xp.astype(array, xp.float32)
    return array


def upcast_all(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Float32 in place of half precision."""
    return {name: upcast(array) for name, array in arrays.items()}


def cast(array: Array, dtype: Any) -> Array:
    """The array in `dtype`; the same array when it already is."""
    return array if array.dtype == dtype else namespace(array).astype(array, dtype)


def device_of(array: Array) -> str:
    """The kind of device: `"cpu"`, `"cuda"`, `"tpu"` …"""
    library = library_of(array)
    if library == "torch":
        return str(array.device.type)
    if library == "cupy":
        return "cuda"
    if library == "jax":
        jax = sys.modules["jax"]
        if isinstance(array, jax.core.Tracer):
            # A traced array has no device yet; it will run where this process runs jitted code.
            platform = jax.default_backend()
        else:
            platform = next(iter(array.devices())).platform
        return "cuda" if platform == "gpu" else str(platform)
    return "cpu"


def exact_device(array: Array) -> Any:
    """The device itself, to compare; None where an array (a traced one) has none."""
    library = library_of(array)
    if library == "torch":
        return array.device
    if library == "jax":
        return None if is_traced(array) else frozenset(array.devices())
    return array_api_compat.device(array)


def is_traced(array: Array) -> bool:
    """Whether the array's values can not be looked at: under jit, compile, vmap or grad."""
    library = library_of(array)
    if library == "torch":
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling() or array.is_meta:
            return True
        return _is_transformed(array) or type(array).__name__ == "FakeTensor"
    if library == "jax":
        return isinstance(array, sys.modules["jax"].core.Tracer)
    return False


def _is_transformed(tensor: Array) -> bool:
    """Whether a torch.func transform (vmap, grad, jvp) stands between the tensor and its values."""
    return bool(sys.modules["torch"]._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_compiling() -> bool:
    """Whether `torch.compile` is looking."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def wants_gradient(*arrays: Array) -> bool:
    """Whether a derivative of a function of these arrays may be asked for later.

    PyTorch says so. JAX does not: an array that is being traced may be differentiated.
    """
    library = library_of(arrays[0])
    if library == "torch":
        torch = sys.modules["torch"]
        # A transformed tensor does not say whether the one below it wants a gradient.
        return bool(torch.is_grad_enabled()) and any(
            a.requires_grad or _is_transformed(a) for a in arrays
        )
    return library == "jax" and any(is_traced(a) for a in arrays)


def transforms_of(*arrays: Array) -> frozenset[str]:
    """`"grad"` and `"vmap"`, where a transform of torch.func differentiates or maps these."""
    if library_of(arrays[0]) != "torch":
        return frozenset()
    functorch = sys.modules["torch"]._C._functorch
    found = set()
    for tensor in arrays:
        while _is_transformed(tensor):
            if functorch.is_gradtrackingtensor(tensor):
                found.add("grad")
            if functorch.is_batchedtensor(tensor):
                found.add("vmap")
            tensor = functorch.get_unwrapped(tensor)
    return frozenset(found)


def writes_in_place(array: Array) -> bool:
    """Whether `array[index] = values` is allowed, with arrays of integers as the index."""
    return library_of(array) in ("numpy", "torch", "cupy") and not is_traced(array)


def host_integers(array: Array) -> list[int] | None:
    """The values of integers (b,) where it costs nothing to look at them: on a CPU, untraced."""
    if library_of(array) not in ("numpy", "torch") or device_of(array) != "cpu":
        return None
    return None if is_traced(array) else [int(n) for n in array.tolist()]


def copied(array: Array) -> Array:
    """A copy with the same order in memory, of a library that writes in place."""
    return array.clone() if library_of(array) == "torch" else array.copy(order="K")


def stop_gradient(array: Array) -> Array:
    """The same values, constant to automatic differentiation."""
    library = library_of(array)
    if library == "torch":
        return array.detach()
    if library == "jax":
        return sys.modules["jax"].lax.stop_gradient(array)
    return array


def placement(array: Array) -> dict[str, Any]:
    """Keyword arguments that create an array beside `array`.

    JAX places new arrays itself, and its traced arrays have no device to name.
    """
    return {} if library_of(array) == "jax" else {"device": exact_device(array)}


def arange_like(n: int, array: Array) -> Array:
    """0, 1, … n − 1 as int32, beside `array`."""
    xp = namespace(array)
    return xp.arange(n, dtype=xp.int32, **placement(array))


def as_index(array: Array) -> Array:
    """Integers in a dtype that the library takes as an index. PyTorch takes int64 only."""
    return array.long() if library_of(array) == "torch" else array


def zero_where_not(mask: Array, array: Array) -> Array:
    """`array` where `mask` holds, else 0; a NaN or an infinity that is masked out does not pass."""
    found = namespace(array).where(mask, array, 0.0)
    return cast(found, array.dtype)  # NumPy makes float64 of bfloat16.


def is_finite_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # A whole number beyond the range of a float.
        return False
