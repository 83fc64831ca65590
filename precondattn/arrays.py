"""The functions that depend on the array library.

Other modules do not import a framework, except in the folders of a framework (`execution/torch/`,
`parallel/jax/` …) and the modules of `native/` that are named after one. A call imports those when
it needs them. This module imports no framework at all: a library is recognised by the type of an
array, so that its module is already loaded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeVar

import array_api_compat
import numpy as np

Array = Any
"""An array of any supported library."""

Arrays = dict[str, Array]
"""Arrays by name."""

ByName = Mapping[str, Array]
"""Arrays by name, read-only."""

Residuals = tuple[Array, ...]
"""The arrays that a forward pass saves for its gradient, besides inputs and output."""

Shape = tuple[int, ...]

F = TypeVar("F", bound=Callable[..., object])

Device = Any
"""A device of any supported library, or its name."""

DType = Any
"""A data type of any supported library."""

Index = Any
"""An index of an array: slices, integers, integer arrays."""

FlopCounter = Any
"""A FlopCounterMode of PyTorch."""

Tree = Any
"""A pytree: arrays in tuples, lists and dicts."""

Namespace = Any
"""The functions of an array library, with the names of the array API standard."""

HALF = frozenset({"float16", "bfloat16"})
FLOATING = HALF | {"float32", "float64"}


_library_of_type: dict[type, str | None] = {}
_namespace_of_type: dict[type, Namespace] = {}
_names: dict[DType, str] = {}
_wide: set[tuple[type, DType]] = set()
"""Pairs of an array type and a dtype that is not half precision."""


def library_of(array: Array) -> str | None:
    """The name of the library of `array`, or None if it is not an array."""
    kind = type(array)
    if kind not in _library_of_type:
        _library_of_type[kind] = _recognise(array)
    return _library_of_type[kind]


def _recognise(array: Array) -> str | None:
    _wait_for_imports()
    # The dtype does not matter: an array of JAX's float0 is an array of NumPy too.
    if isinstance(array, np.ndarray | np.generic):
        # The mask of a masked array would be ignored, and * of matrices is a matrix product.
        return None if hasattr(array, "mask") or isinstance(array, np.matrix) else "numpy"
    if array_api_compat.is_torch_array(array):
        return None if hasattr(array, "get_mask") else "torch"
    if array_api_compat.is_jax_array(array):
        return "jax"
    if array_api_compat.is_cupy_array(array):
        return "cupy"
    if hasattr(array, "__array_namespace__"):
        name: str = array.__array_namespace__().__name__
        return name.partition(".")[0]
    return None


def _wait_for_imports() -> None:
    """Wait for a framework that another thread is importing; its types are not there yet."""
    for name in ("torch", "jax", "cupy"):
        if name in sys.modules:
            with suppress(ImportError):  # The framework is broken, so no array is of it.
                import_module(name)


def namespace(*arrays: Array | None) -> Namespace:
    """The array-API namespace of the arrays; arguments that are None are ignored."""
    first = arrays[0]
    if first is None:
        first = next(array for array in arrays if array is not None)
    known = _namespace_of_type.get(type(first))
    if known is not None:
        return known
    _wait_for_imports()
    xp = array_api_compat.array_namespace(*(a for a in arrays if a is not None))
    if library_of(first) is not None:
        _namespace_of_type[type(first)] = xp
    return xp


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


def upcast_all(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays, with those in half precision converted to float32."""
    return {
        name: array if (type(array), array.dtype) in _wide else upcast(array)
        for name, array in arrays.items()
    }


def cast(array: Array, dtype: DType) -> Array:
    """The array in `dtype`; the same array if it has that dtype."""
    return array if array.dtype == dtype else namespace(array).astype(array, dtype)


def device_of(array: Array) -> str:
    """The kind of an array's device: `"cpu"`, `"cuda"`, `"tpu"` …"""
    library = library_of(array)
    if library == "torch":
        return str(array.device.type)
    if library == "cupy":
        return "cuda"
    if library == "jax":
        jax = sys.modules["jax"]
        if isinstance(array, jax.core.Tracer):
            # A traced array has no device yet; jitted code runs on the default backend.
            platform = jax.default_backend()
        else:
            platform = next(iter(array.devices())).platform
        return "cuda" if platform == "gpu" else str(platform)
    return "cpu"


def exact_device(array: Array) -> Device:
    """The device object of an array, for comparison; None for a traced array, which has none."""
    library = library_of(array)
    if library == "torch":
        return array.device
    if library == "jax":
        return None if is_traced(array) else frozenset(array.devices())
    return "cpu" if library == "numpy" else array_api_compat.device(array)


def storage_of(array: Array) -> str | None:
    """The storage of a PyTorch tensor that is not dense, such as "nested"; otherwise None."""
    if library_of(array) != "torch":
        return None
    if array.is_nested:
        return "nested"
    torch = sys.modules["torch"]
    return None if array.layout == torch.strided else str(array.layout).rpartition(".")[2]


def is_recorded_by_jit() -> bool:
    """Whether `torch.jit.trace` records what is called."""
    torch = sys.modules.get("torch")
    return torch is not None and torch._C._get_tracing_state() is not None


_FAKE = frozenset({"FakeTensor", "FunctionalTensor"})
"""The names of PyTorch's tensor types without entries, used for tracing."""


def is_traced(array: Array) -> bool:
    """Whether the array's entries can not be read, as under jit, compile, vmap or grad.

    While a CUDA graph captures a call they can not be read either: its replays have other entries.
    """
    library = library_of(array)
    if library == "torch":
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling() or array.is_meta or is_captured(array):
            return True
        return _is_transformed(array) or type(array).__name__ in _FAKE or _is_proxied()
    if library == "jax":
        return isinstance(array, sys.modules["jax"].core.Tracer)
    return False


def has_only_a_shape(array: Array) -> bool:
    """Whether the array is a meta or a fake tensor, whose result is needed for its shape only.

    While `make_fx` records a graph, it is not, as the graph is run with entries.
    """
    is_tensor = library_of(array) == "torch"
    return is_tensor and (array.is_meta or type(array).__name__ in _FAKE) and not _is_proxied()


def is_captured(tensor: Array) -> bool:
    """Whether a CUDA graph captures what is computed from a tensor of PyTorch."""
    return bool(tensor.is_cuda and sys.modules["torch"].cuda.is_current_stream_capturing())


def _is_transformed(tensor: Array) -> bool:
    """Whether a torch.func transform (vmap, grad, jvp) wraps the tensor."""
    return bool(sys.modules["torch"]._C._functorch.is_functorch_wrapped_tensor(tensor))


def _is_proxied() -> bool:
    """Whether `make_fx` records a graph, which must not depend on the entries of tensors."""
    c = sys.modules["torch"]._C
    return c._get_dispatch_mode(c._TorchDispatchModeKey.PROXY) is not None


def is_distributed(arrays: Iterable[Array], named: Mapping[str, Array], *others: object) -> bool:
    """Whether one of the arguments is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    types = {*map(type, arrays), *map(type, named.values()), *map(type, others)}
    return any(issubclass(each, module.DTensor) for each in types)


def only_computes() -> bool:
    """Whether PyTorch only computes now, so that nothing traces, transforms or counts calls."""
    torch = sys.modules["torch"]
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or is_compiling()
    )


def is_compiling() -> bool:
    """Whether `torch.compile` is tracing."""
    # While another thread imports PyTorch, the module does not have its names yet.
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and bool(compiler.is_compiling())


def is_traced_by_dynamo() -> bool:
    """Whether `torch.compile` is tracing this line instead of running it."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and bool(compiler.is_dynamo_compiling())


def traceable(function: F) -> F:
    """A function with an `lru_cache`, which calls the function without the cache if Dynamo traces.

    Dynamo traces into the function in any case, and would warn about the ignored cache.
    """
    if is_traced_by_dynamo():
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function


def wants_gradient(*arrays: Array) -> bool:
    """Whether a derivative of a function of these arrays may be needed later.

    PyTorch tensors record this. JAX arrays do not: any traced array may be differentiated.
    """
    library = library_of(arrays[0])
    if library == "torch":
        torch = sys.modules["torch"]
        # A transformed tensor does not show whether the wrapped one requires a gradient.
        return bool(torch.is_grad_enabled()) and any(
            a.requires_grad or _is_transformed(a) for a in arrays
        )
    return library == "jax" and any(is_traced(a) for a in arrays)


def transforms_of(*arrays: Array) -> frozenset[str]:
    """The set of `"grad"` and `"vmap"`, as far as torch.func differentiates or maps the arrays.

    A tangent of `torch.autograd.forward_ad` counts as `"grad"` too.
    """
    if library_of(arrays[0]) != "torch":
        return frozenset()
    functorch = sys.modules["torch"]._C._functorch
    transforms = set()
    for tensor in arrays:
        while _is_transformed(tensor):
            if functorch.is_gradtrackingtensor(tensor):
                transforms.add("grad")
            if functorch.is_batchedtensor(tensor):
                transforms.add("vmap")
            tensor = functorch.get_unwrapped(tensor)
    if not transforms and has_tangent(*arrays):
        transforms.add("grad")
    return frozenset(transforms)


def has_tangent(*tensors: Array) -> bool:
    """Whether one of the tensors has a tangent of `torch.autograd.forward_ad`."""
    forward_ad = sys.modules["torch"].autograd.forward_ad
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def flop_counters() -> list[FlopCounter]:
    """PyTorch's active FlopCounterModes."""
    torch, module = sys.modules["torch"], sys.modules.get("torch.utils.flop_counter")
    if module is None or not torch._C._len_torch_dispatch_stack():
        return []
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return [mode.counter for mode in modes if isinstance(mode, module._FlopCounterMode)]


def counts_flops() -> bool:
    """Whether a FlopCounterMode of PyTorch is active."""
    return bool(flop_counters())


def writes_in_place(array: Array, *updates: Array) -> bool:
    """Whether `array[index] = update` is allowed, with integer arrays as the index."""
    library = library_of(array)
    if library not in ("numpy", "torch", "cupy"):
        return False
    if is_traced(array) and not (library == "torch" and is_captured(array)):
        return False
    # A transform may wrap only the updates.
    return library != "torch" or not any(map(_is_transformed, updates))


def writable(array: Array) -> Array:
    """The array; a copy of a view that is read-only or repeats entries, if a library has such."""
    library = library_of(array)
    if library not in ("numpy", "torch", "cupy"):
        return array
    strides = array.stride() if library == "torch" else array.strides
    repeats = 0 in [step for size, step in zip(array.shape, strides, strict=True) if size > 1]
    is_read_only = library == "numpy" and not array.flags.writeable
    return copied(array) if repeats or is_read_only else array


def host_integers(array: Array) -> list[int] | None:
    """The entries of an integer array (b,) as a list; None if it is traced or not on the CPU."""
    if library_of(array) not in ("numpy", "torch") or device_of(array) != "cpu":
        return None
    if is_traced(array):
        return None
    integers: list[int] = array.tolist()
    return integers


def host_array(array: Array) -> Array:
    """The array as a NumPy array, after waiting for its device; None if it can not be read."""
    library = library_of(array)
    if library == "numpy":
        return array
    if is_traced(array):
        return None
    if library == "torch":
        functorch = sys.modules["torch"]._C._functorch
        if functorch.peek_interpreter_stack() is not None:
            return None  # While a transform is active, no tensor becomes a NumPy array.
        return array.detach().cpu().numpy()
    if library == "jax":
        return np.asarray(array)
    if library == "cupy":
        return array.get()
    return np.from_dlpack(array) if hasattr(array, "__dlpack__") else None


def on_device_of(like: Array, array: Array) -> Array:
    """A NumPy array, or an array of `like`'s library, on the device of `like`, without waiting."""
    if library_of(like) == "torch":
        is_host = library_of(array) == "numpy"  # Without a device it would be on the default one.
        tensor = sys.modules["torch"].as_tensor(array, device="cpu") if is_host else array
        if tensor.device == like.device:
            return tensor
        is_pinned = like.is_cuda and not is_traced(tensor)
        return (tensor.pin_memory() if is_pinned else tensor).to(like.device, non_blocking=True)
    return namespace(like).asarray(array, **placement(like))


def copied(array: Array) -> Array:
    """A copy with the same memory layout, in libraries whose arrays can be written to."""
    return array.clone() if library_of(array) == "torch" else array.copy(order="K")


def fresh(array: Array) -> Array:
    """A copy that shares no memory with the array."""
    library = library_of(array)
    if library in ("numpy", "torch", "cupy"):
        return copied(array)
    if library == "jax":
        return sys.modules["jax"].numpy.array(array)
    return namespace(array).asarray(array, copy=True)


def read_only(array: Array) -> Array:
    """A read-only view of a NumPy array; arrays of other libraries are returned unchanged."""
    if library_of(array) != "numpy":
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def in_order(array: Array) -> Array:
    """A copy in row-major order."""
    library = library_of(array)
    if library == "torch":
        return array.clone(memory_format=sys.modules["torch"].contiguous_format)
    return array.copy(order="C") if library in ("numpy", "cupy") else fresh(array)


def contiguous(array: Array) -> Array:
    """The array in row-major order, copied only if it is not, in libraries with strides."""
    library = library_of(array)
    if library == "torch":
        return array if array.is_contiguous() else array.contiguous()
    has_strides = library in ("numpy", "cupy")
    return in_order(array) if has_strides and not array.flags.c_contiguous else array


def stop_gradient(array: Array) -> Array:
    """The array as a constant of automatic differentiation."""
    library = library_of(array)
    if library == "torch":
        return array.detach()
    if library == "jax":
        return sys.modules["jax"].lax.stop_gradient(array)
    return array


def placement(array: Array) -> dict[str, Device]:
    """Keyword arguments that create an array on the device of `array`.

    They are empty where JAX does that itself: on its default device, and for traced and sharded
    arrays.
    """
    if library_of(array) != "jax":
        return {"device": exact_device(array)}
    jax = sys.modules["jax"]
    if is_traced(array) or len(array.devices()) > 1:
        return {}
    default, (device,) = jax.config.jax_default_device, array.devices()
    if not isinstance(default, jax.Device):  # None, or the name of a platform.
        default = jax.local_devices(backend=default)[0]
    return {} if device == default else {"device": device}


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


def take_tokens(array: Array, tokens: Array) -> Array:
    """The tokens (b, c) of each sequence of an array (b, t, …), as (b, c, …)."""
    if library_of(array) == "jax":
        return _take_tokens_in_jax(array, tokens)
    xp = namespace(array)
    b, t = array.shape[:2]
    row = arange_like(b, tokens)[:, None] * t + tokens
    flat = xp.reshape(array, (b * t, *array.shape[2:]))
    taken = xp.take(flat, xp.reshape(row, (-1,)), axis=0)
    return xp.reshape(taken, (*tokens.shape, *array.shape[2:]))


def _take_tokens_in_jax(array: Array, tokens: Array) -> Array:
    """`take_tokens` without communication between devices that have different sequences."""
    jax = sys.modules["jax"]
    sharding = jax.typeof(array).sharding
    if sharding.mesh.explicit_axes:
        of_sequences = jax.sharding.PartitionSpec(sharding.spec[0])
        tokens = jax.sharding.reshard(tokens, sharding.update(spec=of_sequences))

    def take(sequence: Array, tokens: Array) -> Array:
        return sequence.at[tokens].get(mode="promise_in_bounds")

    return jax.vmap(take)(array, tokens)


def gathered(array: Array, axis: int) -> Array:
    """The array, not sharded over an axis, which JAX's explicit mode requires for a scan."""
    if library_of(array) != "jax":
        return array
    jax = sys.modules["jax"]
    sharding = jax.typeof(array).sharding
    if not sharding.mesh.explicit_axes or sharding.spec[axis] is None:
        return array
    names = (None if i == axis else name for i, name in enumerate(sharding.spec))
    return jax.sharding.reshard(array, sharding.update(spec=jax.sharding.PartitionSpec(*names)))


def split_rows(array: Array, counts: Sequence[int]) -> list[Array]:
    """The array split along its first axis into pieces with `counts` rows."""
    if len(counts) == 1:
        return [array]
    if library_of(array) == "torch":  # Its gradient is one concatenation.
        return list(array.split(list(counts)))
    stops = np.cumsum(counts).tolist()
    return [array[stop - n : stop, ...] for stop, n in zip(stops, counts, strict=True)]


def as_index(array: Array) -> Array:
    """Integers in a dtype that the library accepts as an index (in PyTorch only int64)."""
    return array.long() if library_of(array) == "torch" else array


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
