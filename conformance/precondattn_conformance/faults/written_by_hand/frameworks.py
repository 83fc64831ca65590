"""Faults that show only on PyTorch: of half precision and threads.

Inputs in half precision are exact; the quantities computed from them need more digits.
"""

from __future__ import annotations

import time
from types import ModuleType

from precondattn.arrays import Array
from precondattn.spec import recurrence, rms_norm, softmax
from precondattn.spec.recurrence import Stream
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    Change,
    Function,
    MethodCall,
    MethodResult,
    Truth,
    inside,
    written,
)

BOTH = (FORWARD, BACKWARD)
SECONDS = 0.02
"""Seconds between writing to memory that calls share and reading it."""


def _in_calls(dtype: str, change: Change) -> Change:
    """A change of the calls of one dtype."""

    def planted(truth: Truth, call: MethodCall) -> MethodResult:
        return change(truth, call) if call.dtype == dtype else truth(call)

    return planted


def _rounded(x: Array, dtype: str) -> Array:
    import torch

    return x.to(getattr(torch, dtype)).to(x.dtype)


def _bfloat16_state(true: Function) -> Function:
    def stepped(state: Array, token: Stream) -> tuple[Array, Array]:
        state, o = true(state, token)
        return _rounded(state, "bfloat16"), o

    return stepped


_rounded_state = inside(recurrence, "_write_and_read", _bfloat16_state)


def _rounded_argument(module: ModuleType, name: str) -> Change:
    return inside(module, name, lambda true: lambda x, *more: true(_rounded(x, "float16"), *more))


_shared: dict[str, MethodCall] = {}


def _through_shared_memory(truth: Truth, call: MethodCall) -> MethodResult:
    _shared["call"] = call
    time.sleep(SECONDS)
    return truth(_shared["call"])


FAULTS = [
    written(mechanism, stages, detail, change, carrier="autograd", library="torch")
    for mechanism, stages, detail, change in (
        ("linear", BOTH, "the state in bfloat16", _in_calls("bfloat16", _rounded_state)),
        (
            "softmax",
            BOTH,
            "the logits before the maximum is subtracted in float16",
            _in_calls("float16", _rounded_argument(softmax, "log_softmax")),
        ),
        (
            "rms_norm",
            BOTH,
            "squares in float16",
            _in_calls("float16", _rounded_argument(rms_norm, "row_sum")),
        ),
        ("softmax", FORWARD, "inputs in memory that calls share", _through_shared_memory),
    )
]
