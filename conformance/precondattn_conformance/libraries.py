"""The array libraries: conversion to and from NumPy, views, and automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from precondattn.arrays import Array, Arrays, namespace
from precondattn.installed import is_installed

WIDE = ("float64", "float32")
HALF = ("float16", "bfloat16")
SHARING = ("numpy", "torch", "cupy")
"""Libraries that have the same checks on the same data, but for dtypes."""
Transform = Callable[[Callable[..., Any]], Callable[..., Any]]


MOST_REGIONS = 45_000
"""Memory regions of a process. Linux kills a process with more than 65,530, and JAX on a CPU maps a
few for every operation and shape that it compiles."""

STRICT_DEVICE = "device1"
"""A non-default device of array_api_strict, so that an array made without a device is detected."""


class Library:
    """An array library: NumPy itself, and the base of the others."""

    name = "numpy"
    module = "numpy"
    dtypes: tuple[str, ...] = WIDE

    compiles_operations = False
    """Whether each operation is compiled for each shape, which takes longer than running it."""

    thread_counts: tuple[int | None, ...] = (None,)
    """The numbers of threads to compute with; None if the library has no such setting."""

    autograd = ""
    """Snippet code that differentiates the call with respect to the input NAME."""

    def __init__(self, device: str | None = None) -> None:
        self.device = device

    @classmethod
    def is_installed(cls) -> bool:
        return is_installed(cls.module)

    def precision(self, dtype: str) -> AbstractContextManager[object]:
        """A context that enables this dtype."""
        return nullcontext()

    def threads(self, count: int | None) -> AbstractContextManager[object]:
        """A context in which the library computes with this many threads."""
        return nullcontext()

    def array(self, values: np.ndarray, dtype: str | None = None) -> Array:
        """A copy of a NumPy array, converted to `dtype` if it is floating-point."""
        return values.astype(dtype) if dtype and values.dtype.kind == "f" else values.copy()

    def numpy(self, array: Array) -> np.ndarray:
        """The array as a NumPy array in float64."""
        return np.asarray(array, dtype=np.float64)

    def dtype_name(self, array: Array) -> str:
        """The name of the dtype, such as "float32"."""
        return str(array.dtype).rpartition(".")[2]

    def view(self, array: Array, order: str) -> Array:
        """A view with the same elements, stored in another order in memory."""
        rank, xp = array.ndim, namespace(array)
        if rank == 0:
            return array
        nans = partial(xp.full, fill_value=xp.nan, dtype=array.dtype, device=array.device)
        if order == "heads_first":
            axes = (0, 2, 1, 3) if rank == 4 else tuple(reversed(range(rank)))
            inverse = tuple(sorted(range(rank), key=lambda axis: axes[axis]))
            shape = tuple(array.shape[axis] for axis in axes)
            view = xp.permute_dims(nans(shape), inverse)
        elif order == "every_other_element":
            larger = nans((*array.shape[:-1], 2 * array.shape[-1] + 1))
            view = larger[..., 1::2]
        else:
            larger = nans(tuple(size + 2 for size in array.shape))
            view = larger[(slice(1, -1),) * rank]
        view[...] = array
        return view

    def gradients(
        self, function: Callable[[Arrays], Array], inputs: Arrays, cotangent: Array
    ) -> Arrays | None:
        """The gradients by the library's own automatic differentiation; None if it has none."""
        gradients = self.held_gradients(function, [inputs], [cotangent])
        return None if gradients is None else gradients[0]

    def held_gradients(
        self,
        function: Callable[[Arrays], Array],
        inputs: Sequence[Arrays],
        cotangents: Sequence[Array],
    ) -> list[Arrays] | None:
        """The gradients of several calls, all of which are made before the first gradient."""
        return None

    def autocast(self, dtype: str) -> AbstractContextManager[object]:
        """A context in which the library itself casts inputs to `dtype`."""
        return nullcontext()

    def transforms(self) -> dict[str, Transform]:
        """The library's own transformations; "vmap" maps a function over the first axis."""
        return {}

    def forget(self) -> None:
        """Empty the library's caches if they have become too large; called between two cases."""


class StrictLibrary(Library):
    """array_api_strict with every optional feature off, on a device that is not the default one."""

    name = "array_api_strict"
    module = "array_api_strict"

    def precision(self, dtype: str) -> AbstractContextManager[object]:
        import array_api_strict

        return array_api_strict.ArrayAPIStrictFlags(
            boolean_indexing=False, data_dependent_shapes=False, enabled_extensions=("linalg",)
        )

    def array(self, values: np.ndarray, dtype: str | None = None) -> Array:
        import array_api_strict

        device = array_api_strict.Device(STRICT_DEVICE)
        return array_api_strict.asarray(super().array(values, dtype), device=device)

    def numpy(self, array: Array) -> np.ndarray:
        import array_api_strict

        if array.device != array_api_strict.Device(STRICT_DEVICE):
            raise ValueError(
                f"an array must be on the inputs' {STRICT_DEVICE}; found {array.device}"
            )
        return np.from_dlpack(array).astype(np.float64)


class TorchLibrary(Library):
    name = "torch"
    module = "torch"
    dtypes = WIDE + HALF
    thread_counts = (1, 2, 4)
    autograd = """inputs["NAME"].requires_grad_()
out = mechanism(**inputs, backend={backend})
(gradient,) = torch.autograd.grad(out, inputs["NAME"], expected.cotangent)
gradients = {{"NAME": gradient}}"""

    @contextmanager
    def threads(self, count: int | None) -> Iterator[None]:
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(count or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def array(self, values: np.ndarray, dtype: str | None = None) -> Array:
        import torch

        tensor = torch.tensor(values.copy(), device=self.device)
        return tensor.to(getattr(torch, dtype)) if dtype and values.dtype.kind == "f" else tensor

    def numpy(self, array: Array) -> np.ndarray:
        return np.asarray(array.detach().double().cpu().numpy())

    def autocast(self, dtype: str) -> AbstractContextManager[object]:
        import torch

        device = torch.device(self.device or "cpu").type
        autocast: AbstractContextManager[object] = torch.autocast(device, getattr(torch, dtype))
        return autocast

    def transforms(self) -> dict[str, Transform]:
        import torch

        return {"vmap": torch.vmap, "compile": _compiled}

    def held_gradients(
        self,
        function: Callable[[Arrays], Array],
        inputs: Sequence[Arrays],
        cotangents: Sequence[Array],
    ) -> list[Arrays]:
        import torch

        leaves = [
            {n: a.detach().requires_grad_() for n, a in of_call.items()} for of_call in inputs
        ]
        outs = [function(of_call) for of_call in leaves]
        # The output of a single token depends on no decay, whose gradient is 0.
        options = {"allow_unused": True, "materialize_grads": True}
        calls = zip(leaves, outs, cotangents, strict=True)
        return [
            dict(zip(x, torch.autograd.grad(out, [*x.values()], d, **options), strict=True))
            for x, out, d in calls
        ]


def _compiled(function: Callable[[Arrays], Array]) -> Callable[[Arrays], Array]:
    """The function compiled by `torch.compile`, after a reset of its small cache."""
    import torch

    torch.compiler.reset()
    compiled: Callable[[Arrays], Array] = torch.compile(function, backend="aot_eager")
    return compiled


class JaxLibrary(Library):
    name = "jax"
    module = "jax"
    dtypes = WIDE + HALF
    compiles_operations = True
    autograd = """out, pullback = jax.vjp(
    lambda array: mechanism(**inputs | {{"NAME": array}}, backend={backend}), inputs["NAME"]
)
gradients = {{"NAME": pullback(expected.cotangent)[0]}}"""

    def precision(self, dtype: str) -> AbstractContextManager[object]:
        import jax

        enabled: AbstractContextManager[object] = jax.enable_x64(dtype == "float64")
        return enabled

    def array(self, values: np.ndarray, dtype: str | None = None) -> Array:
        import jax
        import jax.numpy as jnp

        device = jax.devices(self.device)[0] if self.device else None
        wanted = dtype if values.dtype.kind == "f" else None
        if values.dtype.kind == "i":
            wanted = "int32"
        if wanted is not None:  # Not by JAX, which compiles it for each shape.
            values = values.astype(jnp.dtype(wanted))
        return jnp.asarray(values, device=device)

    def numpy(self, array: Array) -> np.ndarray:
        return np.asarray(array).astype(np.float64)

    def transforms(self) -> dict[str, Transform]:
        import jax

        return {"vmap": jax.vmap, "jit": jax.jit}

    def forget(self) -> None:
        import jax

        if mapped_regions() > MOST_REGIONS:
            jax.clear_caches()

    def held_gradients(
        self,
        function: Callable[[Arrays], Array],
        inputs: Sequence[Arrays],
        cotangents: Sequence[Array],
    ) -> list[Arrays]:
        import jax

        pullbacks = [jax.vjp(function, of_call)[1] for of_call in inputs]
        return [pullback(d)[0] for pullback, d in zip(pullbacks, cotangents, strict=True)]


def mapped_regions() -> int:
    """The number of memory regions of this process; 0 if unknown."""
    regions = Path("/proc/self/maps")
    return regions.read_bytes().count(b"\n") if regions.exists() else 0


class CuPyLibrary(Library):
    name = "cupy"
    module = "cupy"
    dtypes = WIDE + HALF

    @classmethod
    def is_installed(cls) -> bool:
        if not super().is_installed():
            return False
        import cupy

        try:
            return bool(cupy.cuda.runtime.getDeviceCount() > 0)
        except cupy.cuda.runtime.CUDARuntimeError:
            return False

    def array(self, values: np.ndarray, dtype: str | None = None) -> Array:
        import cupy

        if dtype == "bfloat16":
            import ml_dtypes  # noqa: F401  NumPy knows the name from it.
        return cupy.asarray(super().array(values, dtype))

    def numpy(self, array: Array) -> np.ndarray:
        return np.asarray(array.get().astype(np.float64))


ALL: tuple[type[Library], ...] = (Library, StrictLibrary, TorchLibrary, JaxLibrary, CuPyLibrary)


def installed() -> list[str]:
    """The names of the libraries that are installed."""
    return [cls.name for cls in ALL if cls.is_installed()]


def require_device(names: Iterable[str], device: str | None) -> None:
    """Raise a ValueError for a library that has no such device on this machine."""
    for name in dict.fromkeys(names):
        try:
            named(name, device).array(np.zeros(1), "float32")
        except (RuntimeError, AssertionError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{name} has no device {device!r} here: {reason}") from None


def named(name: str, device: str | None = None) -> Library:
    """A library by its name."""
    for cls in ALL:
        if cls.name == name:
            return cls(device)
    raise ValueError(f"unknown array library {name!r}; known are {[c.name for c in ALL]}")
