"""The layout `zigzag`: softmax attention to keys that go around, with equal work (`layouts.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from precondattn.parallel import contiguous_torch, ring_torch
from precondattn.parallel.call_torch import Call, Processes

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Mechanism


def refusal(mechanism: Mechanism, call: Call, processes: Processes) -> str | None:
    """Why a call can not be divided like this; None where it can."""
    if not contiguous_torch.is_softmax(mechanism):
        return "is for softmax attention; use the layout 'contiguous' or 'heads'"
    if any(count % 2 for count in call.tokens["t"]):
        return f"expects two equal parts of tokens on every process; found {call.tokens['t']}"
    return contiguous_torch.refusal(mechanism, call, processes)


def output(call: Call, processes: Processes) -> Tensor:
    """The output of this process's tokens."""
    return ring_torch.output(call, processes, is_zigzag=True)


during, bytes_sent = contiguous_torch.during, contiguous_torch.bytes_sent
