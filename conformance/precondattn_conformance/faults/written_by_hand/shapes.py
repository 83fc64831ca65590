"""Faults of widths, batches, strides and workspaces that are right for common sizes.

They are typical of kernels: a width for equal widths, a workspace that calls of the same shapes
share.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from precondattn.arrays import Array
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    MethodCall,
    MethodResult,
    Truth,
    with_call,
    written,
)


def _only_d_columns(truth: Truth, call: MethodCall) -> MethodResult:
    result = truth(call)
    out = result.out.copy()
    out[..., call.inputs["k"].shape[-1] :] = 0
    return replace(result, out=out)


def _only_128_columns(truth: Truth, call: MethodCall) -> MethodResult:
    result = truth(call)
    out = np.array(result.out)
    out[..., 128:] = 0
    return replace(result, out=out)


def _dense(call: MethodCall) -> MethodCall:
    """An expanded array read as if its entries were stored one after another."""
    inputs = dict(call.inputs)
    for name, array in inputs.items():
        for axis, (stride, size) in enumerate(zip(array.strides, array.shape, strict=True)):
            if stride == 0 and size > 1:
                kept = (np.arange(size) == 0).reshape(-1, *(1,) * (array.ndim - axis - 1))
                inputs[name] = np.where(kept, array, 0).astype(array.dtype)
    return replace(call, inputs=inputs)


def _summed(truth: Truth, call: MethodCall) -> MethodResult:
    """The gradient of an expanded input, added up in the memory of its single entry."""
    result = truth(call)
    gradients = dict(result.gradients)
    for name, array in call.inputs.items():
        axes = tuple(i for i, step in enumerate(array.strides) if not step and array.shape[i] > 1)
        if axes:
            total = gradients[name].sum(axis=axes, keepdims=True)
            gradients[name] = np.broadcast_to(total, array.shape).copy()
    return replace(result, gradients=gradients)


def _shapes(call: MethodCall) -> tuple[object, ...]:
    return tuple((name, array.shape, str(array.dtype)) for name, array in call.inputs.items())


class _SharedWorkspace:
    """A workspace for the output that all calls of the same shapes share."""

    def __init__(self) -> None:
        self.outputs: dict[tuple[object, ...], Array] = {}

    def __call__(self, truth: Truth, call: MethodCall) -> MethodResult:
        if call.stage == FORWARD:
            result = truth(call)
            self.outputs[_shapes(call)] = result.out
            return result
        return truth(replace(call, out=self.outputs.get(_shapes(call), call.out)))


FAULTS = [
    written("gated_delta", FORWARD, "only d columns of wider values", _only_d_columns),
    written("linear", FORWARD, "no column of values from 128 on", _only_128_columns),
    written("path", FORWARD, "zeros after the first of an expanded axis", with_call(_dense)),
    written("gla", BACKWARD, "gradients summed over expanded axes", _summed),
    written(
        "softmax",
        (FORWARD, BACKWARD),
        "the output of the last forward of these shapes",
        _SharedWorkspace(),
    ),
]
