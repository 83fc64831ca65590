"""The masks of a layout, by name. Two names joined by + stand for both masks together.

==============  ==============================================================================
lengths         three tokens apart, the last sequence the longest
lengths_apart   a block apart, the last sequence the longest
lengths_edge    exactly a block, then the whole sequence, then nothing
key_mask        every fourth key is masked
key_blocks      more than a block of keys is masked, from the middle of a block
key_start       the first keys are masked, more than a block in sequence 0: padding on the left
segment_ids     segments of three tokens
segments_edge   a segment begins exactly at each block's edge; in odd sequences at its middle
segments_long   three tokens, one segment to five tokens before the end, then those
prefix          the first third of the tokens, in each further sequence two tokens more
attn_mask       every fifth pair is masked, and all pairs of one query
attn_heads      every fifth pair of each head is masked, shifted from head to head
==============  ==============================================================================
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Mask = Callable[[int, int, int], np.ndarray]
"""A mask from the numbers of sequences and keys, and the block size or the number of heads."""


def _shorter(b: int, s: int, step: int) -> np.ndarray:
    return np.asarray([max(s - step * (b - 1 - i), 0) for i in range(b)])


def _key_blocks(b: int, s: int, block: int) -> np.ndarray:
    index = np.arange(s) - np.arange(b)[:, None]
    first = max(block // 2, 1)
    return np.asarray((index < first) | (index >= first + block + 3))


def _key_start(b: int, s: int, block: int) -> np.ndarray:
    masked = np.where(np.arange(b) % 2 == 0, min(block + 1, s // 2), 1)
    return np.asarray(np.arange(s) >= masked[:, None])


def _segments_edge(b: int, s: int, block: int) -> np.ndarray:
    shift = np.arange(b)[:, None] % 2 * (block // 2)
    return np.asarray((np.arange(s) + shift) // block)


def _segments_long(b: int, s: int, block: int) -> np.ndarray:
    index = np.broadcast_to(np.arange(s), (b, s))
    return np.asarray((index >= min(3, s // 2)) + 0 + (index >= max(s - 5, s // 2)))


def _attn_mask(b: int, s: int, block: int) -> np.ndarray:
    sequence, query, key = np.arange(b)[:, None, None], np.arange(s)[:, None], np.arange(s)
    is_visible = ((sequence + query + 2 * key) % 5 != 0) & (query != s // 2)
    return np.asarray(is_visible[:, None])


def _attn_heads(b: int, s: int, h: int) -> np.ndarray:
    sequence, head = np.arange(b)[:, None, None, None], np.arange(h)[:, None, None]
    query, key = np.arange(s)[:, None], np.arange(s)
    return np.asarray((sequence + 2 * head + query + 3 * key) % 5 != 0)


OF_PAIRS = ("prefix", "attn_mask")
"""The arguments that are masks of pairs, which not every mechanism and backend supports."""

PATTERNS: dict[str, tuple[str, Mask]] = {
    "lengths": ("lengths", lambda b, s, block: _shorter(b, s, 3)),
    "lengths_apart": (
        "lengths",
        lambda b, s, block: (
            _shorter(b, s, block) if b > 1 else np.asarray([max(s - block // 2, 1)])
        ),
    ),
    "lengths_edge": (
        "lengths",
        lambda b, s, block: np.minimum(np.resize([block, s, 0], b), s),
    ),
    "key_mask": (
        "key_mask",
        lambda b, s, block: (np.arange(b)[:, None] + np.arange(s)) % 4 != 1,
    ),
    "key_blocks": ("key_mask", _key_blocks),
    "key_start": ("key_mask", _key_start),
    "segment_ids": (
        "segment_ids",
        lambda b, s, block: (np.arange(b)[:, None] + np.arange(s)) // 3,
    ),
    "segments_edge": ("segment_ids", _segments_edge),
    "segments_long": ("segment_ids", _segments_long),
    "prefix": ("prefix", lambda b, s, block: np.minimum(s // 3 + 2 * np.arange(b), s)),
    "attn_mask": ("attn_mask", _attn_mask),
    "attn_heads": ("attn_mask", _attn_heads),
}
"""The argument of a call and the function that makes its entries, by the mask's name."""


def masks(names: str | None, b: int, s: int, h: int, block: int) -> dict[str, np.ndarray]:
    """The masks of a call, by the names of its arguments."""
    chosen = [PATTERNS[name] for name in names.split("+")] if names else []
    return {argument: make(b, s, h if make is _attn_heads else block) for argument, make in chosen}


def arguments(names: str | None) -> frozenset[str]:
    """The names of the arguments that these masks need."""
    return frozenset(PATTERNS[name][0] for name in names.split("+")) if names else frozenset()
