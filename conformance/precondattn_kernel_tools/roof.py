"""The roofline of a kernel: its shortest possible time on a GPU, and a predicted time.

    roof = max(products / tensor rate, exponentials / special rate, bytes / bandwidth)

No version of a kernel runs much faster than its roof. The rates are those of data sheets; a GPU
reaches less. `pace` is the share of the roof that a full GPU is expected to reach within a loop.
The predicted time adds effects that the roof does not include:

    time = launches × gap + roof / (pace × filled)

`filled` is the share of the multiprocessors' time that a grid occupies: 132 programs take as long
as one, and 133 as long as 264, if a multiprocessor runs one at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

LAUNCH_GAP = 3e-6
"""Seconds between two kernels if the second waits for the first."""


@dataclass(frozen=True)
class Device:
    """A GPU with the figures of its data sheet."""

    name: str
    source: str
    multiprocessors: int
    half: float
    """FLOP/s of 16-bit products on tensor cores, without sparsity."""
    tf32: float
    special: float
    """Exponentials per second: 16 per multiprocessor and cycle."""
    bandwidth: float
    """Bytes per second."""


H100 = Device(
    "H100 SXM",
    "NVIDIA H100 data sheet: 1,979 and 989 TFLOP/s with sparsity, 3.35 TB/s; 132 multiprocessors",
    132,
    989e12,
    494e12,
    16 * 132 * 1.755e9,
    3.35e12,
)
H200 = Device(
    "H200",
    "NVIDIA H200 data sheet: the rates of an H100, and 4.8 TB/s",
    132,
    989e12,
    494e12,
    16 * 132 * 1.755e9,
    4.8e12,
)


HALF, FULL = 2, 4
"""Bytes of a number in half and in full precision."""


class Size(NamedTuple):
    """The sizes of a call."""

    heads: int
    """The number of heads of all sequences."""
    tokens: int
    d: int
    e: int


def causal_pairs(t: int, rows: int, columns: int) -> int:
    """The number of pairs in all tiles that a causal loop visits, for tiles of this size."""
    return sum(rows * columns * -(-(a + rows) // columns) for a in range(0, t, rows))


@dataclass(frozen=True)
class KernelWork:
    """The work of all launches of a kernel in one call."""

    kernel: str
    launches: tuple[int, ...]
    """The number of programs of each launch."""
    half: float
    """FLOPs of products with 16-bit factors."""
    tf32: float
    """FLOPs of products with factors in tf32; a product in three parts counts three times."""
    exponentials: float
    bytes: float
    """Bytes if each launch reads each input once and writes each output once."""
    requested: float
    """Bytes that programs read and write, part of which caches provide."""


@dataclass(frozen=True)
class Roof:
    """The shortest possible time, and the unit that limits it."""

    seconds: float
    limit: str


def roof(work: KernelWork, device: Device) -> Roof:
    """The largest of the times of the units."""
    times = {
        "tensor cores": work.half / device.half + work.tf32 / device.tf32,
        "exponentials": work.exponentials / device.special,
        "bandwidth": work.bytes / device.bandwidth,
    }
    limit = max(times, key=lambda name: times[name])
    return Roof(times[limit], limit)


def filled(work: KernelWork, device: Device, resident: int) -> float:
    """The occupied share of the multiprocessors' time, with `resident` programs on each."""
    at_a_time = device.multiprocessors * resident
    taken = sum(math.ceil(programs / at_a_time) * at_a_time for programs in work.launches)
    return sum(work.launches) / taken


def predicted(work: KernelWork, device: Device, pace: float, resident: int) -> float:
    """Predicted seconds of all launches."""
    seconds = roof(work, device).seconds / (pace * filled(work, device, resident))
    return seconds + len(work.launches) * LAUNCH_GAP


def prediction(
    work: KernelWork, size: Size, devices: tuple[Device, ...], pace: float, resident: int
) -> dict[str, object]:
    """A JSON row: the work of a kernel and, for each device, its roof and the predicted time."""
    at = {}
    for device in devices:
        least, seconds = roof(work, device), predicted(work, device, pace, resident)
        at[device.name] = {
            "roof": least.seconds,
            "limit": least.limit,
            "seconds": seconds,
            "share": least.seconds / seconds,
        }
    return {
        "kernel": work.kernel,
        "heads": size.heads,
        "tokens": size.tokens,
        "width": size.d,
        "launches": len(work.launches),
        "flops": work.half + work.tf32,
        "exponentials": work.exponentials,
        "bytes": work.bytes,
        "requested": work.requested,
        "pace": pace,
        "devices": at,
    }
