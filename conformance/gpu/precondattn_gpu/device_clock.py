"""Times between two events on the device, with the gaps between kernels.

On a CPU, times are wall-clock times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

LEAST, MOST_CALLS = 0.015, 50
"""A round repeats a call for at least this many seconds, but at most this many times."""


class TorchClock:
    """The clock of calls of PyTorch on the current stream."""

    def __init__(self, device: str) -> None:
        self.has_events = device != "cpu"

    def seconds(self, call: Callable[[], object], calls: int) -> float:
        """The seconds of one call, on average."""
        if not self.has_events:
            start = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - start) / calls
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / calls


def in_turns(
    calls: Mapping[str, tuple[TorchClock, Callable[[], object]]], rounds: int
) -> dict[str, list[float]]:
    """The seconds of each call in each round. A round times every call once."""
    for clock, call in calls.values():
        clock.seconds(call, 1)  # The first call loads libraries.
    counts = {
        name: min(max(round(LEAST / max(clock.seconds(call, 1), 1e-6)), 1), MOST_CALLS)
        for name, (clock, call) in calls.items()
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (clock, call) in calls.items():
            times[name].append(clock.seconds(call, counts[name]))
    return times
