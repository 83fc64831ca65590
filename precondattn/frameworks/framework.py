"""What differs between array libraries: the class that each implements.

`Framework` itself serves a library that has the array-API standard and nothing else. NumPy and CuPy
(`plain.py`) write in place. PyTorch and JAX have folders of their own, and override more.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module

import array_api_compat
import numpy as np

from precondattn.frameworks.types import (
    Array,
    Arrays,
    Device,
    DType,
    FromAbove,
    Namespace,
    Step,
    Token,
    Tree,
)

TIME = 2
"""The index of the time axis in a scan, after batch and heads."""

INF = math.inf

_namespace_of_type: dict[type, Namespace] = {}
_NOTHING: AbstractContextManager[object] = nullcontext()


def wait_for_imports() -> None:
    """Wait for a framework that another thread is importing; its types are not there yet."""
    for name in ("torch", "jax", "cupy"):
        if name in sys.modules:
            with suppress(ImportError):  # The framework is broken, so no array is of it.
                import_module(name)


def namespace(*arrays: Array | None) -> Namespace:
    """The array-API namespace of the arrays; arguments that are None are ignored."""
    array = arrays[0]
    if array is None:
        array = next(each for each in arrays if each is not None)
    xp = _namespace_of_type.get(type(array))
    if xp is not None:
        return xp
    wait_for_imports()
    xp = array_api_compat.array_namespace(*(each for each in arrays if each is not None))
    return _namespace_of_type.setdefault(type(array), xp)


class Framework:
    """The functions of an array library that the array-API standard does not have."""

    reads_at_once = False
    """Whether arrays on the CPU are read without waiting."""
    check_division: Callable[..., None] | None = None
    """The function of a mechanism and a call that raises an error where each device has an unknown
    part of the sequences; None where there is no such thing."""
    state_of_calls: Callable[[Array], Tree] | None = None
    """The function of an array for what else a call depends on; None where there is nothing. Its
    result is None for a call that must be planned each time."""
    ignores_errors = True
    """Whether errors of floating-point numbers that are none must be ignored (`evaluation.py`)."""
    is_distributed = False

    def __init__(self, name: str | None) -> None:
        self.name = name
        """The library's name; None for what is not an array."""

    def device_of(self, array: Array) -> str:
        """The kind of an array's device: `"cpu"`, `"cuda"`, `"tpu"` …"""
        return "cpu"

    def exact_device(self, array: Array) -> Device:
        """The device object of an array, for comparison; None for a traced array."""
        return array_api_compat.device(array)

    def placement(self, array: Array) -> dict[str, Device]:
        """Keyword arguments that create an array on the device of `array`."""
        return {"device": self.exact_device(array)}

    def reason_against(self, dtype: str) -> str | None:
        """Why the library has no arrays of a dtype now; None if it has."""
        return None

    def storage_of(self, array: Array) -> str | None:
        """The storage of a tensor that is not dense, such as "nested"; otherwise None."""
        return None

    def is_traced(self, array: Array) -> bool:
        """Whether entries can not be read, as under jit, vmap or grad, or in a CUDA graph."""
        return False

    def has_only_a_shape(self, array: Array) -> bool:
        """Whether the array is a meta or fake tensor, not recorded by `make_fx` for real ones."""
        return False

    def is_captured(self, array: Array) -> bool:
        """Whether a CUDA graph captures what is computed from an array."""
        return False

    def is_ordinary(self, array: Array) -> bool:
        """Whether a call is being exported as PyTorch's own operators (`ordinary.py`)."""
        return False

    def is_far(self, array: Array) -> bool:
        """Whether reading an array waits for a device that the host works ahead of."""
        return False

    def is_recorded_by_jit(self) -> bool:
        """Whether `torch.jit.trace` records what is called."""
        return False

    def only_computes(self) -> bool:
        """Whether nothing traces, transforms or counts the calls of PyTorch now."""
        return True

    def description(self, array: Array) -> Callable[[Array], Tree] | None:
        """The function that describes arrays of this type in a signature; None without one."""
        return self._described

    def _described(self, array: Array) -> Tree:
        return type(array), array.dtype, tuple(array.shape), str(self.exact_device(array))

    def wants_gradient(self, *arrays: Array) -> bool:
        """Whether a derivative of a function of these arrays may be needed later."""
        return False

    def transforms_of(self, *arrays: Array) -> frozenset[str]:
        """The set of `"grad"` and `"vmap"`, as far as PyTorch differentiates or maps the arrays."""
        return frozenset()

    def writes_in_place(self, array: Array, *updates: Array) -> bool:
        """Whether `array[index] = update` is allowed, with integer arrays as the index."""
        return False

    def all_writable(self, arrays: Iterable[Array]) -> bool:
        """Whether no array is a view that is read-only or repeats entries."""
        return True

    def writable(self, array: Array) -> Array:
        """The array; a copy if it is not writable."""
        return array

    def fresh(self, array: Array) -> Array:
        """A copy that shares no memory with the array, and has its memory layout."""
        return namespace(array).asarray(array, copy=True)

    def in_order(self, array: Array) -> Array:
        """A copy in row-major order."""
        return self.fresh(array)

    def contiguous(self, array: Array) -> Array:
        """The array in row-major order, copied only if it is not, in libraries with strides."""
        return array

    def read_only(self, array: Array) -> Array:
        """A read-only view of a NumPy array; arrays of other libraries are returned unchanged."""
        return array

    def counted_writes(self, array: Array) -> int | None:
        """The number of writes to a tensor; None where they are not counted."""
        return None

    def is_of_inference(self, array: Array) -> bool:
        """Whether a tensor was made in PyTorch's inference mode, which records nothing."""
        return False

    def host_integers(self, array: Array) -> list[int] | None:
        """The entries of an integer array (b,) as a list; None if traced or not on the CPU."""
        return None

    def host_array(self, array: Array) -> Array:
        """The array as a NumPy array, after waiting for its device; None if it can not be read."""
        return np.from_dlpack(array) if hasattr(array, "__dlpack__") else None

    def on_device_of(self, like: Array, array: Array) -> Array:
        """An array of NumPy or of `like`'s library, on `like`'s device, without waiting."""
        return namespace(like).asarray(array, **self.placement(like))

    def stop_gradient(self, array: Array) -> Array:
        """The array as a constant of automatic differentiation."""
        return array

    def take_tokens(self, array: Array, tokens: Array) -> Array:
        """The tokens (b, c) of each sequence of an array (b, t, …), as (b, c, …)."""
        xp, (b, t) = namespace(array), array.shape[:2]
        rows = xp.arange(b, dtype=xp.int32, **self.placement(tokens))[:, None] * t + tokens
        flat = xp.reshape(array, (b * t, *array.shape[2:]))
        taken = xp.take(flat, xp.reshape(rows, (-1,)), axis=0)
        return xp.reshape(taken, (*tokens.shape, *array.shape[2:]))

    def gathered(self, array: Array, axis: int) -> Array:
        """The array, not sharded over an axis, which JAX's explicit mode requires for a scan."""
        return array

    def split_rows(self, array: Array, counts: Sequence[int]) -> list[Array]:
        """The array split along its first axis into pieces with `counts` rows."""
        stops = np.cumsum(counts).tolist()
        return [array[stop - n : stop, ...] for stop, n in zip(stops, counts, strict=True)]

    def as_index(self, array: Array) -> Array:
        """Integers in a dtype that the library accepts as an index (in PyTorch only int64)."""
        return array

    def sort(self, array: Array, axis: int) -> Array:
        """The entries along an axis in ascending order."""
        return namespace(array).sort(array, axis=axis)

    def nonempty(self, array: Array, axis: int) -> Array:
        """The array, followed by −∞ along an axis whose size a graph does not know."""
        return array

    def cholesky(self, matrix: Array) -> Array:
        """The lower-triangular L of A = L Lᵀ, for matrices (…, s, s)."""
        return namespace(matrix).linalg.cholesky(matrix)

    def solve_triangular(self, matrix: Array, right: Array, *, lower: bool) -> Array | None:
        """The solution matrix⁻¹ right (…, s, e); None if the library has no triangular solver."""
        return None

    def running_maximum(self, array: Array, axis: int) -> Array:
        """The cumulative maximum along an axis."""
        xp, distance = namespace(array), 1
        array = xp.moveaxis(array, axis, 0)
        while distance < array.shape[0]:
            later = xp.maximum(array[distance:, ...], array[:-distance, ...])
            array = xp.concat([array[:distance, ...], later], axis=0)
            distance *= 2
        return xp.moveaxis(array, 0, axis)

    def scan(
        self, step: Step, state: Array, inputs: Token, *, reverse: bool = False
    ) -> tuple[Array, Array]:
        """The last state, and the outputs along axis 2, of `state, output = step(state, token)`.

        Inputs are (b, m, t, …), and outputs always in the order of tokens. `step` must be a
        module-level function, because JAX caches the compiled scan by its identity.
        """
        times, outputs = range(inputs[0].shape[TIME]), []
        for t in reversed(times) if reverse else times:
            state, output = step(state, tuple(x[:, :, t, ...] for x in inputs))
            outputs.append(output)
        return state, namespace(state).stack(outputs[::-1] if reverse else outputs, axis=TIME)

    def linear_scan(self, factor: Array, value: Array, *, times: Step, plus: Step) -> Array:
        """The recurrence y_t = factor_t ⊗ y_{t−1} ⊕ value_t along the last axis, from value_0.

        `plus` ⊕ and `times` ⊗ are the operations of a semiring, such as + and ·, or max and +. Each
        of log₂ s steps reaches twice as far back.
        """
        xp, distance = namespace(value), 1
        while distance < value.shape[-1]:
            reached = times(factor[..., distance:], value[..., :-distance])
            later = plus(reached, value[..., distance:])
            value = xp.concat([value[..., :distance], later], axis=-1)
            both = times(factor[..., distance:], factor[..., :-distance])
            factor = xp.concat([factor[..., :distance], both], axis=-1)
            distance *= 2
        return value

    def traced_loop(self, *arrays: Array) -> Step | None:
        """JAX's loop over the first axis of trees of arrays, if it traces one of the arrays."""
        return None

    def depending_on(self, zeros: Array, arrays: Iterable[Array]) -> Array:
        """Zeros whose gradients with respect to arrays are 0, if autograd records them."""
        return zeros

    def compiled(self, function: Callable[..., Array]) -> Callable[..., Array]:
        """A function that the library runs as a whole, if it would compile each operation alone."""
        return function

    def vjp(
        self, function: Step, arrays: Sequence[Array], cotangents: Sequence[Array]
    ) -> tuple[Array, ...]:
        """The gradients of the arrays, from the cotangents of all results of the function."""
        raise TypeError(f"{self.name} has no automatic differentiation")

    def are_finite(self, array: Array, low: float | None) -> bool:
        """Whether all entries are known to be good: finite, or −∞ where `low`, the least, is −∞."""
        return bool(namespace(array).all(good_entries(array, low)))

    def good_along(self, array: Array, axes: tuple[int, ...], low: float | None) -> Array:
        """Whether all entries along these axes are good; they keep size 1."""
        return namespace(array).all(good_entries(array, low), axis=axes, keepdims=True)

    def cast_inputs(
        self, declared: FromAbove, inputs: Arrays
    ) -> tuple[Arrays, Mapping[str, DType] | None]:
        """The inputs as autocast casts them, and their dtypes before; None if autocast is off."""
        return inputs, None

    def without_autocast(self, array: Array) -> AbstractContextManager[object]:
        """A context without autocast on the device of `array`."""
        return _NOTHING

    def bridge(self, planned: FromAbove, call: FromAbove) -> Callable[..., Array] | None:
        """The function that runs a call and registers its gradient; None if none is needed."""
        return None

    def bridge_of_step(
        self, call: FromAbove, length: Array, planned: FromAbove, *arrays: Array
    ) -> Step | None:
        """Like `bridge`, for a step with these buffers and inputs."""
        return None

    def mapped_operators(self, planned: FromAbove, gradient: str, *arrays: Array) -> Tree:
        """The functions that `torch.vmap` maps; None outside it."""
        return None

    def moved_rows(self, array: Array, rows: Sequence[Array]) -> Array | None:
        """Rows moved by an operator with a gradient of its own; None if none is needed."""
        return None

    def adopted_cache(self, cache: FromAbove, like: Array) -> FromAbove:
        """The cache in the library of the inputs `like`, and not of PyTorch's inference mode."""
        return cache


def good_entries(array: Array, low: float | None) -> Array:
    """Whether entries are finite, or a log-decay of −∞, which resets a state."""
    return array < INF if low == -INF else namespace(array).isfinite(array)


def repeats_entries(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether several entries of a view are one in memory."""
    return 0 in [step for size, step in zip(shape, strides, strict=True) if size > 1]
