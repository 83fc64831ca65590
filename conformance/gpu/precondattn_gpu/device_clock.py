"""Device times: between two events, and of the replay of a recorded graph.

    between events: the device's time of a call, gaps between its kernels included
    by replay: the same kernels launched by the device itself, without Python

On a CPU, times are wall-clock times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

LEAST, MOST_CALLS = 0.015, 50
"""A round repeats a call for at least this many seconds, but at most this many times."""
WARM_UPS = 2


class TorchClock:
    """Calls of PyTorch on the current stream."""

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

    def recorded(self, call: Callable[[], object]) -> Callable[[], object]:
        """A function that replays the kernels of a call."""
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                call()
        before = torch.cuda.current_stream()
        before.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call()
        finally:  # The stream of a recording that fails would stay the current one.
            torch.cuda.set_stream(before)
        replay: Callable[[], object] = graph.replay
        return replay


class CupyClock:
    """Calls of CuPy on a stream that is not the default one, as recording needs it."""

    def __init__(self) -> None:
        import cupy

        self.cupy, self.stream = cupy, cupy.cuda.Stream(non_blocking=True)

    def seconds(self, call: Callable[[], object], calls: int) -> float:
        """The seconds of one call, on average."""
        events = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        self.cupy.cuda.Device().synchronize()
        with self.stream:
            events[0].record()
            for _ in range(calls):
                call()
            events[1].record()
        events[1].synchronize()
        return float(self.cupy.cuda.get_elapsed_time(*events)) / 1e3 / calls

    def recorded(self, call: Callable[[], object]) -> Callable[[], object]:
        """A function that replays the kernels of a call."""
        with self.stream:
            for _ in range(WARM_UPS):
                call()
            self.stream.synchronize()
            self.stream.begin_capture()
            try:
                call()
            finally:
                graph = self.stream.end_capture()
        return lambda: graph.launch(self.stream)


Clock = TorchClock | CupyClock


def in_turns(
    calls: Mapping[str, tuple[Clock, Callable[[], object]]], rounds: int
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
