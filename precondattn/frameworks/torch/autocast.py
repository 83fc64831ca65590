"""PyTorch's autocast, with the rules of PyTorch's own fused attention.

Under `torch.autocast(device, dtype)`, queries, keys, values and other rows of tokens are cast to
`dtype` from float16, bfloat16 and float32, but not from float64. Gates, weights and the like stay
in float32 if they are. The call is then an ordinary call in half precision. Autocast is off inside
it, forward and backward, so that everything is computed in float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from precondattn.algebra.declaration import Inputs
from precondattn.arrays import HALF, Array, Arrays, DType, dtype_name

_OFF: AbstractContextManager[object] = nullcontext()


def target(array: Array) -> DType:
    """The dtype of autocast on the device of `array`; None if autocast is off."""
    if not isinstance(array, Tensor):
        return None
    device = array.device.type
    try:
        is_on = torch.is_autocast_enabled(device)
    except RuntimeError:  # The device has no autocast.
        return None
    return torch.get_autocast_dtype(device) if is_on else None


def cast_inputs(declared: Inputs, inputs: dict[str, Array]) -> tuple[Arrays, DType]:
    """The inputs as autocast casts them, and their dtypes before; None if autocast is off."""
    dtype = target(next(iter(inputs.values()), None))
    if dtype is None:
        return inputs, None
    cast = {}
    for name, array in inputs.items():
        is_cast = isinstance(array, Tensor) and dtype_name(array) in (*HALF, "float32")
        keeps_float32 = not declared[name].is_rows and is_cast and dtype_name(array) == "float32"
        cast[name] = array.to(dtype) if is_cast and not keeps_float32 else array
    return cast, {name: getattr(array, "dtype", None) for name, array in inputs.items()}


def off(array: Array) -> AbstractContextManager[object]:
    """A context without autocast on the device of `array`."""
    context = _OFF
    if target(array) is not None:
        context = torch.autocast(array.device.type, enabled=False)
    return context
