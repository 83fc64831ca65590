"""What a call asks of a GPU, counted without one.

    with absent_gpu() as (device, launches):
        counts = counts_of(run, launches)  # `run` makes a call with arrays on the device.

Triton's launches, and PyTorch's operators that launch a kernel themselves, with the bytes of their
arguments and results. Views and allocations are none. PyTorch's own attention is not counted.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from precondattn_kernel_tools.absent_device.absent_gpu import Launches


class CallCounts(NamedTuple):
    """The counts of one call."""

    launches: int
    """Launches of Triton's kernels."""
    operators: dict[str, int]
    """PyTorch's operators that launch a kernel, by name."""
    bytes: int
    """The bytes of the arguments and results of these operators."""
    live_bytes: int
    """The most bytes of arrays that existed at once, beyond those of the arguments."""


def counts_of(run: Callable[[], object], launches: Launches) -> CallCounts:
    """The counts of the second time that a call is made, inside `absent_gpu`.

    Raises
    ------
    RuntimeError
        if it reads an entry on the host, or copies between the host and the device: then a CUDA
        graph could not capture it.
    """
    import torch

    recorded = torch.ops.absent.operators

    def run_in_one_thread() -> None:
        # Autograd's thread for a device would free arrays at no fixed moment, also as Python exits.
        with torch.autograd.set_multithreading_enabled(False):
            run()

    run_in_one_thread()
    gc.collect()  # What an earlier call left behind is not freed during this one.
    before = launches.count
    torch.ops.absent.most_bytes()
    recorded(True)
    gc.disable()
    try:
        run_in_one_thread()
    finally:
        gc.enable()
        live_bytes = torch.ops.absent.most_bytes()
        lines = [line.split() for line in recorded(False).splitlines()]
    names = Counter(name.partition("::")[2] for name, _ in lines)
    total = sum(int(count) for _, count in lines)
    return CallCounts(launches.count - before, dict(sorted(names.items())), total, live_bytes)
