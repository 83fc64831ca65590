"""Faults that show only with several threads: memory shared by calls, and divided work."""

from __future__ import annotations

import time
from dataclasses import replace

from precondattn_conformance.faults.fault import FORWARD, Fault, MethodCall, MethodResult, Truth
from precondattn_conformance.faults.written_by_hand.written import written

SECONDS = 0.02
"""Seconds between writing to the shared memory and reading it."""


def faults() -> list[Fault]:
    """All faults in this file, on PyTorch."""
    return [
        written("softmax", FORWARD, detail, change, carrier="autograd", library="torch")
        for detail, change in (
            ("inputs in memory that calls share", _through_shared_memory),
            ("rows divided among threads, without the remainder", _without_remainder),
        )
    ]


_shared: dict[str, MethodCall] = {}


def _through_shared_memory(truth: Truth, call: MethodCall) -> MethodResult:
    _shared["call"] = call
    time.sleep(SECONDS)
    return truth(_shared["call"])


def _without_remainder(truth: Truth, call: MethodCall) -> MethodResult:
    import torch

    result = truth(call)
    rows, threads = result.out.shape[1], torch.get_num_threads()
    if rows < 128:  # There are too few rows to divide.
        return result
    computed = torch.arange(rows) < rows // threads * threads
    return replace(result, out=torch.where(computed[:, None, None], result.out, 0.0))
