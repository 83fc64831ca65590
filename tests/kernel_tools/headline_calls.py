"""Calls that ask the absent GPU what they would ask a GPU.

A step extends a cache that is half full, whose length the host knows, as in generation of text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch

import precondattn as pa
from precondattn.cache.known_lengths import remembered
from precondattn.frameworks.torch.framework import PyTorch
from precondattn_kernel_tools.absent_device import NAME

TARGET = "sm_90"
BACKENDS = ("triton", "torch")
HEADS, WIDTH = 16, 128
FORWARD, BOTH, STEP = "forward", "forward and backward", "step"


class HeadlineCall(NamedTuple):
    """A call of a mechanism with b = 1, h = n = 16 and d = e = 128, in bfloat16."""

    mechanism: str
    work: str
    tokens: int = 8192

    @property
    def name(self) -> str:
        return f"{self.mechanism} {self.tokens} {self.work}"


_MECHANISMS = ("laser", "gated_delta", "gla", "path", "ccq(gated_delta)")
CALLS = (
    *(HeadlineCall("lucid", work, tokens) for tokens in (8192, 32768) for work in (FORWARD, BOTH)),
    *(HeadlineCall(name, work) for name in _MECHANISMS for work in (FORWARD, BOTH)),
    *(HeadlineCall(name, STEP) for name in ("lucid", "path", "gated_delta")),
)


def ready(call: HeadlineCall, device: torch.device | str) -> Callable[[], object]:
    """A function that makes the call, with the same inputs each time; a step continues the last."""
    mechanism = pa.parse(call.mechanism)
    if call.work == STEP:
        return _steps(call, device)
    inputs = inputs_of(call, call.tokens, device, requires_grad=call.work == BOTH)
    if call.work == FORWARD:

        def forward() -> object:
            with torch.no_grad():
                return mechanism(**inputs, backend=BACKENDS)

        return forward
    cotangent = torch.empty_like(inputs["v"])

    def both() -> object:
        out = mechanism(**inputs, backend=BACKENDS)
        return torch.autograd.grad(out, [*inputs.values()], cotangent)

    return both


def _steps(call: HeadlineCall, device: torch.device | str) -> Callable[[], object]:
    mechanism, token = pa.parse(call.mechanism), inputs_of(call, 1, device)
    empty, half = mechanism.init_cache(**token, capacity=call.tokens), call.tokens // 2
    caches = [empty._replace(length=remembered(torch.full_like(empty.length, half), half))]

    def step() -> object:
        with torch.no_grad():
            out, caches[0] = mechanism.extend(caches[0], **token, backend=BACKENDS, donate=True)
        return out

    return step


def inputs_of(
    call: HeadlineCall, tokens: int, device: torch.device | str, *, requires_grad: bool = False
) -> dict[str, torch.Tensor]:
    """Zeros for the inputs of the call, with this number of queries and of keys."""
    heads = dict.fromkeys(("h", "n", "u"), HEADS)
    sizes = {"b": 1, "t": tokens, "s": tokens, **heads, "d": WIDTH, "e": WIDTH}
    options = {"dtype": torch.bfloat16, "device": device, "requires_grad": requires_grad}
    patterns = pa.parse(call.mechanism).inputs
    return {name: torch.zeros(p.shape(sizes), **options) for name, p in patterns.items()}


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """A context in which the backend accepts tensors off the GPU, and calls read none of them."""
    from precondattn_triton.backend import Triton
    from precondattn_triton.target import compiling_for

    with (
        patch.object(Triton, "refuses_request", lambda *_: None),
        patch.object(PyTorch, "reads_at_once", False),
        compiling_for(TARGET),
    ):
        yield


@contextmanager
def captured() -> Iterator[None]:
    """A context in which calls behave as while a CUDA graph captures them."""

    def is_captured(_: PyTorch, tensor: torch.Tensor) -> bool:
        return str(tensor.device.type) == NAME

    with patch.object(PyTorch, "is_captured", is_captured):
        yield
