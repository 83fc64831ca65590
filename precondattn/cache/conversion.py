"""Converting a cache to another dtype or device."""

from __future__ import annotations

import array_api_compat
import numpy as np

from precondattn.arrays import (
    FLOATING,
    HALF,
    cast,
    dtype_name,
    exact_device,
    fresh,
    library_of,
    namespace,
)
from precondattn.cache.kinds import C, holding, kinds_of
from precondattn.frameworks import of
from precondattn.frameworks.types import Array, Device, DType


def to(cache: C, device: Device, dtype: DType) -> C:
    kinds = kinds_of(cache)
    if device is None and dtype is None:
        raise TypeError("to: pass a device, a dtype, or both")
    store = {}
    for name, buffer in cache.store.items():
        new = buffer if dtype is None else _in_dtype(dtype, buffer, kinds[name].is_wide)
        store[name] = _apart(device, new, buffer)
    return holding(cache, _apart(device, cache.length, cache.length), store)


def with_writable_buffers(cache: C) -> C:
    """The cache, for donation: buffers that can not be written to are copied."""
    framework, buffers = of(cache.length), cache.store
    if framework.all_writable(buffers.values()):
        return cache
    # A buffer may be of another library: that is an error of the call.
    return holding(cache, cache.length, {n: of(a).writable(a) for n, a in buffers.items()})


def ordinary(cache: C) -> C:
    """The cache, copied if it was made in PyTorch's inference mode."""
    adopted: C = of(cache.length).adopted_cache(cache, cache.length)
    return adopted


def _apart(device: Device, new: Array, old: Array) -> Array:
    """The new array on a device, in memory that it does not share with the old array."""
    new = new if device is None else _on(device, new)
    return fresh(new) if new is old else new


def _in_dtype(dtype: DType, buffer: Array, is_wide: bool) -> Array:
    """A floating-point buffer in `dtype`; a wide buffer stays at least float32."""
    xp, library = namespace(buffer), library_of(buffer)
    wanted = getattr(xp, dtype, dtype) if isinstance(dtype, str) else dtype
    name = "" if isinstance(wanted, str) else str(wanted).rpartition(".")[2]
    if name and library in ("numpy", "cupy", "jax"):
        try:
            name = np.dtype(wanted).name
        except TypeError:
            name = ""
    if name not in FLOATING:
        raise TypeError(
            f"to: dtype must be float16, bfloat16, float32 or float64, as {library} has it; "
            f"found {dtype!r}"
        )
    reason = of(buffer).reason_against(name)
    if reason is not None:
        raise TypeError(f"to: {reason}")
    if dtype_name(buffer) not in FLOATING:
        return buffer
    return cast(buffer, xp.float32 if is_wide and name in HALF else wanted)


def _on(device: Device, array: Array) -> Array:
    if library_of(array) == "numpy" and device != "cpu":
        raise ValueError(f"to: arrays of numpy are on 'cpu'; found the device {device!r}")
    if str(exact_device(array)) == str(device):
        return array
    if isinstance(device, str) and library_of(array) == "array_api_strict":
        device = type(array.device)(device)  # The library's functions take no names.
    return array_api_compat.to_device(array, device)
