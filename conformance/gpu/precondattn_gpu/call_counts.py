"""What a call asks of the device besides its kernels' own work: counted without a GPU.

    with absent_gpu() as (device, launches):
        counts = counts_of(HeadlineCall("lucid", "forward"), device, launches)

Triton's launches, and PyTorch's operators that launch a kernel themselves, with the bytes of their
arguments and results. Views and allocations are none. PyTorch's own attention is not counted. An
array counts once a launch, and whole, also if the kernel reads a part of it, or reads it twice. Of
LUCID's solve, whose launches read parts of arrays, only the parts count (`lucid_parts.py`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from precondattn_gpu.headline_calls import HeadlineCall, ready
from precondattn_gpu.lucid_parts import bytes_of_parts

if TYPE_CHECKING:
    import torch

    from precondattn_gpu.absent_gpu import Launches


class CallCounts(NamedTuple):
    """The counts of one call."""

    launches: int
    """Launches of Triton's kernels."""
    operators: dict[str, int]
    """PyTorch's operators that launch a kernel, by name."""
    bytes: int
    """The bytes of the arguments and results of these operators."""
    launched_bytes: int
    """The bytes of the arrays of Triton's launches, of LUCID's the parts that are read."""

    @property
    def operator_count(self) -> int:
        return sum(self.operators.values())


def counts_of(call: HeadlineCall, device: torch.device, launches: Launches) -> CallCounts:
    """The counts of a call after the first one, inside `absent_gpu`.

    Raises
    ------
    RuntimeError
        if it reads an entry on the host, or copies between the host and the device: then a CUDA
        graph could not capture it.
    """
    import torch

    run, recorded = ready(call, device), torch.ops.absent.operators
    run()
    launches.bytes = (by_kernel := Counter[str]())
    run()
    launches.bytes, before = None, launches.count
    recorded(True)
    try:
        run()
    finally:
        lines = [line.split() for line in recorded(False).splitlines()]
    names = Counter(name.partition("::")[2] for name, _ in lines)
    total = sum(int(count) for _, count in lines)
    count = launches.count - before
    parts = bytes_of_parts(call)
    assert parts.keys() <= by_kernel.keys()
    launched = sum({**by_kernel, **parts}.values())
    return CallCounts(count, dict(sorted(names.items())), total, launched)
