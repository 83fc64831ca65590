"""Where the segments of packed sequences begin and end."""

from __future__ import annotations

import numpy as np


def runs(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first token of each segment of ids (b, s), and its number of tokens.

    Tokens are counted over all sequences: token i of sequence j is j s + i.
    """
    is_first = np.ones(ids.shape, dtype=bool)
    is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = np.flatnonzero(is_first)
    return starts, np.diff(starts, append=ids.size)
