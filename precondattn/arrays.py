"""Everything that depends on the array library, in one place.

No other module imports a framework, except those in a room of that framework (`execution/torch/`,
`parallel/jax/` …) and those of `native/` that are named after one. A call imports these when it
needs them. No framework is imported here: a library is recognised by the type of an array, and its
module is then already loaded.
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
"""Arrays by name, which are only read."""

Residuals = tuple[Array, ...]
"""The arrays that a forward pass saves for its gradient, besides inputs and output."""

Shape = tuple[int, ...]

F = TypeVar("F", bound=Callable[..., object])

Device = Any
"""A device of any supported library, or its name."""

DType = Any
"""A data type of any supported library."""

Index = Any
"""What an array is indexed with: slices, numbers, arrays of numbers."""

FlopCounter = Any
"""A counter of PyTorch's FLOPs."""

Tree = Any
"""Arrays in tuples, lists and dicts, as JAX takes and returns them."""

Namespace = Any
"""The functions of an array library, by the names of the array API."""

HALF = frozenset({"float16", "bfloat16"})
FLOATING = HALF | {"float32", "float64"}


_library_of_type: dict[type, str | None] = {}
_namespace_of_type: dict[type, Namespace] = {}
_names: dict[DType, str] = {}
_wide: set[tuple[type, DType]] = set()
"""Types of arrays with dtypes that are not of half precision."""


def library_of(array: Array) -> str | None:
    """The name of the library of `array`, or None if it is not an array."""
    kind = type(array)
    if kind not in _library_of_type:
        _library_of_type[kind] = _recognise(array)
    return _library_of_type[kind]


def _recognise(array: Array) -> str | None:
    _wait_for_imports()
    # The dtype of an array does not matter: JAX's float0 is an array of NumPy too.
    if isinstance(array, np.ndarray | np.generic):
        # The mask of a masked array would be ignored, and a matrix multiplies as a matrix.
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
    """Wait for a framework that another thread is importing: it can not be asked for its types."""
    for name in ("torch", "jax", "cupy"):
        if name in sys.modules:
            with suppress(ImportError):  # It does not work; no array is of it.
                import_module(name)


def namespace(*arrays: Array | None) -> Namespace:
    """The array-API namespace of the arrays; None is ignored."""
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
    """`"float32"` for every library's float32."""
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
    """The kind of device: `"cpu"`, `"cuda"`, `"tpu"` …"""
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
    """The device object, for comparison; None for an array without one (a traced array)."""
    library = library_of(array)
    if library == "torch":
        return array.device
    if library == "jax":
        return None if is_traced(array) else frozenset(array.devices())
    return "cpu" if library == "numpy" else array_api_compat.device(array)


def storage_of(array: Array) -> str | None:
    """What a tensor of PyTorch is that is not stored as an array of numbers; None if it is one."""
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
"""PyTorch's tensors without entries, with which it traces."""


def is_traced(array: Array) -> bool:
    """Whether the array's entries can not be read: under jit, compile, vmap or grad."""
    library = library_of(array)
    if library == "torch":
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling() or array.is_meta:
            return True
        return _is_transformed(array) or type(array).__name__ in _FAKE or _is_proxied()
    if library == "jax":
        return isinstance(array, sys.modules["jax"].core.Tracer)
    return False


def _is_transformed(tensor: Array) -> bool:
    """Whether a torch.func transform (vmap, grad, jvp) wraps the tensor."""
    return bool(sys.modules["torch"]._C._functorch.is_functorch_wrapped_tensor(tensor))


def _is_proxied() -> bool:
    """Whether `make_fx` records a graph, which the entries of tensors may not enter."""
    c = sys.modules["torch"]._C
    return c._get_dispatch_mode(c._TorchDispatchModeKey.PROXY) is not None


def is_distributed(arrays: Iterable[Array], named: Mapping[str, Array], *others: object) -> bool:
    """Whether one of the arguments is a tensor of PyTorch that several devices hold together."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    types = {*map(type, arrays), *map(type, named.values()), *map(type, others)}
    return any(issubclass(each, module.DTensor) for each in types)


def only_computes() -> bool:
    """Whether PyTorch now only computes: nothing traces, transforms or counts what is called."""
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
    """Whether `torch.compile` reads this line now, instead of running it."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and bool(compiler.is_dynamo_compiling())


def traceable(function: F) -> F:
    """A function with an `lru_cache`, or itself without one where Dynamo traces.

    Dynamo reads the function in any case, and warns of a cache that it passes over.
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
    """`"grad"` and `"vmap"`, if a transform of torch.func differentiates or maps the arrays.

    A tangent of `torch.autograd.forward_ad` is `"grad"` too.
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
    """Whether `torch.autograd.forward_ad` carries a tangent with one of these tensors."""
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
    kinds = (module.FlopCounterMode, getattr(module, "_FlopCounterMode", module.FlopCounterMode))
    return [getattr(mode, "counter", mode) for mode in modes if isinstance(mode, kinds)]


def counts_flops() -> bool:
    """Whether a FlopCounterMode of PyTorch is active."""
    return bool(flop_counters())


def writes_in_place(array: Array, *updates: Array) -> bool:
    """Whether `array[index] = update` is allowed, with integer arrays as the index."""
    library = library_of(array)
    if library not in ("numpy", "torch", "cupy") or is_traced(array):
        return False
    # A transform may wrap the updates alone.
    return library != "torch" or not any(map(_is_transformed, updates))


def host_integers(array: Array) -> list[int] | None:
    """The entries of an integer array (b,) if it is on the CPU and not traced, or else None."""
    if library_of(array) not in ("numpy", "torch") or device_of(array) != "cpu":
        return None
    if is_traced(array):
        return None
    integers: list[int] = array.tolist()
    return integers


def host_array(array: Array) -> Array:
    """The entries as a NumPy array, for which a device is waited for; None if they are unknown."""
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
    return array.get() if library == "cupy" else None


def on_device_of(like: Array, array: Array) -> Array:
    """A NumPy array, or one of the library of `like`, on its device. No device is waited for."""
    if library_of(like) == "torch":
        torch = sys.modules["torch"]
        tensor = torch.as_tensor(array)
        if tensor.device == like.device:
            return tensor
        is_pinned = like.is_cuda and not is_traced(tensor)
        return (tensor.pin_memory() if is_pinned else tensor).to(like.device, non_blocking=True)
    return namespace(like).asarray(array, **placement(like))


def copied(array: Array) -> Array:
    """A copy with the same memory layout, for libraries that write in place."""
    return array.clone() if library_of(array) == "torch" else array.copy(order="K")


def fresh(array: Array) -> Array:
    """A copy that shares no memory."""
    library = library_of(array)
    if library in ("numpy", "torch", "cupy"):
        return copied(array)
    if library == "jax":
        return sys.modules["jax"].numpy.array(array)
    return namespace(array).asarray(array, copy=True)


def read_only(array: Array) -> Array:
    """A view of a NumPy array that can not be written to; other libraries have none."""
    if library_of(array) != "numpy":
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def in_order(array: Array) -> Array:
    """A copy whose elements are stored in the order of its axes."""
    library = library_of(array)
    if library == "torch":
        return array.clone(memory_format=sys.modules["torch"].contiguous_format)
    return array.copy(order="C") if library in ("numpy", "cupy") else fresh(array)


def stop_gradient(array: Array) -> Array:
    """The same array, constant for automatic differentiation."""
    library = library_of(array)
    if library == "torch":
        return array.detach()
    if library == "jax":
        return sys.modules["jax"].lax.stop_gradient(array)
    return array


def placement(array: Array) -> dict[str, Device]:
    """Keyword arguments that create an array on the device of `array`.

    Empty for JAX, which places new arrays itself and whose traced arrays have no device.
    """
    return {} if library_of(array) == "jax" else {"device": exact_device(array)}


def arange_like(n: int, array: Array) -> Array:
    """0, 1, … n − 1 as int32, on the device of `array`."""
    xp = namespace(array)
    return xp.arange(n, dtype=xp.int32, **placement(array))


def differs_from_previous(ids: Array) -> Array:
    """Whether each id (b, t) is another than the one before it; the first is not."""
    xp, token = namespace(ids), arange_like(ids.shape[1], ids)
    # Slices of t − 1 tokens would keep PyTorch from exporting a program for one token too.
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
    """The array, in JAX's explicit mode not sharded over an axis, as JAX requires of a scan."""
    if library_of(array) != "jax":
        return array
    jax = sys.modules["jax"]
    sharding = jax.typeof(array).sharding
    if not sharding.mesh.explicit_axes or sharding.spec[axis] is None:
        return array
    names = (None if i == axis else name for i, name in enumerate(sharding.spec))
    return jax.sharding.reshard(array, sharding.update(spec=jax.sharding.PartitionSpec(*names)))


def split_rows(array: Array, counts: Sequence[int]) -> list[Array]:
    """The first rows of an array, the next ones, and so on: `counts` of them, all together."""
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
