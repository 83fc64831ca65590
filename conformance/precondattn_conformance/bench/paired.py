"""The ratio of two times that were measured in turns.

The speed of a shared machine varies. So contender and peers run in turns, A B A B …, and each round
gives one ratio of two times measured right after each other.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from precondattn.arrays import Arrays


class MeasuredSpread(NamedTuple):
    """The median of measurements, and their quartiles."""

    median: float
    q1: float
    q3: float
    rounds: int


def spread(measurements: Iterable[float]) -> MeasuredSpread:
    """Median and quartiles."""
    data = np.asarray(list(measurements), dtype=np.float64)
    q1, median, q3 = map(float, np.quantile(data, [0.25, 0.5, 0.75]))
    return MeasuredSpread(median, q1, q3, data.size)


def ratio(contender: Iterable[float], peer: Iterable[float]) -> MeasuredSpread:
    """The spread of contender / peer, round by round."""
    return spread(a / b for a, b in zip(contender, peer, strict=True))


class Run(NamedTuple):
    """A function to be timed repeatedly."""

    call: Callable[[], Arrays]
    """Does the work, and returns when it is finished."""
    reset: Callable[[], None] = lambda: None
    """Restores the state before the call; not timed."""


class Turns:
    """The peers' turns: called once per round, before the contender."""

    def __init__(self, peers: Mapping[str, Run]) -> None:
        self.peers = peers
        self.times: dict[str, list[float]] = {name: [] for name in peers}

    def __call__(self) -> None:
        for name, peer in self.peers.items():
            peer.reset()
            self.times[name].append(timed(peer.call))


def timed(call: Callable[[], object]) -> float:
    """The duration of a call in seconds, with the garbage collector disabled."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    finally:
        if was_enabled:
            gc.enable()
