"""Blocks of a few tokens, so that short sequences have several blocks and a shorter last one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from precondattn_conformance.faults.fault import REPLACING
from precondattn_portable import (
    extension,
    read_log_mean_exp,
    symmetric_lucid,
    triangular_inverse,
)
from precondattn_portable.sizes import ON_CPU

BLOCK = 4
"""The number of tokens of a block in most algorithms."""

SMALL = (
    (ON_CPU, {"rows": 2 * BLOCK, "fewest_rows": BLOCK, "row_block_entries": 64}),
    (ON_CPU, {"reflections": BLOCK, "chunk": BLOCK, "chunk_entries": 256, "token_entries": 64}),
    (extension, {"TOKENS": 3}),
    (read_log_mean_exp, {"BLOCK": 2 * BLOCK, "ELEMENTS": 3}),
    (symmetric_lucid, {"DIRECT": 2 * BLOCK}),
    (triangular_inverse, {"LEAF": 2}),
)
"""The block sizes of the blocked algorithms: what has them, and their names."""


@contextmanager
def small_blocks() -> Iterator[None]:
    """Context in which the blocked algorithms use blocks of a few tokens."""
    with REPLACING:
        original = [(owner, {n: getattr(owner, n) for n in sizes}) for owner, sizes in SMALL]
        _set(SMALL)
        try:
            yield
        finally:
            _set(original)


def _set(sizes: Iterable[tuple[object, Mapping[str, int]]]) -> None:
    for owner, numbers in sizes:
        for name, number in numbers.items():
            setattr(owner, name, number)
