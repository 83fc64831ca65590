"""How far a ratio of two medians may be off: a bootstrap interval.

The times a₁ b₁ a₂ b₂ … were taken in turns. They are divided into blocks of consecutive pairs,
because a disturbance lasts longer than one call. Each resample draws as many blocks, with
replacement, and takes

    median(a of the drawn blocks) / median(b of the drawn blocks).

The interval contains the central `LEVEL` of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

BLOCKS = 5
RESAMPLES = 2000
LEVEL = 0.95


class Interval(NamedTuple):
    """A ratio, and the bounds between which it is known."""

    ratio: float
    low: float
    high: float


def ratio_of_medians(ours: Sequence[float], peers: Sequence[float]) -> Interval:
    """The ratio of the medians of times that were taken in turns, with its interval.

    Raises
    ------
    ValueError
        if there are fewer than `BLOCKS` pairs, or not as many times of one as of the other.
    """
    a, b = (np.asarray(times, dtype=np.float64) for times in (ours, peers))
    if a.shape != b.shape or a.ndim != 1 or a.size < BLOCKS:
        raise ValueError(f"expected {BLOCKS} pairs of times or more; found {a.size} and {b.size}")
    # The first pairs that do not fill a block are those nearest to the warm-up.
    size = a.size // BLOCKS
    blocks_of_a, blocks_of_b = (x[-BLOCKS * size :].reshape(BLOCKS, size) for x in (a, b))
    drawn = np.random.default_rng(0).integers(BLOCKS, size=(RESAMPLES, BLOCKS))
    medians = [
        np.median(x[drawn].reshape(RESAMPLES, -1), axis=1) for x in (blocks_of_a, blocks_of_b)
    ]
    low, high = np.quantile(medians[0] / medians[1], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(np.median(a) / np.median(b)), float(low), float(high))
