"""A cache that is divided among processes, and which process keeps which tokens.

What a leaf stores for a token (its key and value, or LUCID's solved value) is a row on one process.
For a token of the prefill it is the process that computed it. All processes have the new tokens.
Each of these is stored by the process that has the fewest tokens of its sequence, and among equals
by the one with the lowest rank. So the numbers become equal, also if the last process had padding
in the prefill. States have no rows: every process has them whole.

Every process knows how many tokens each process has. So the choice needs no communication, and no
value is read from a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from precondattn.algebra.mechanism import Mechanism
from precondattn.arrays import take_tokens
from precondattn.cache import Cache, append
from precondattn.cache.conversion import ordinary
from precondattn.cache.kinds import holding, kinds_of
from precondattn.parallel.layouts import TokenPart

Counts = tuple[tuple[int, ...], ...]
"""A number of tokens for each process and each sequence."""


@dataclass(frozen=True, eq=False)
class DividedCache:
    """One process's part of the cache of a divided call: the rows of its tokens, and all states.

    `ContextParallel.prefill` creates it, and `ContextParallel.extend` extends it. It can be used
    with the mechanism, mesh and layout that created it. `redistribute` makes an ordinary `Cache`.
    """

    mechanism: Mechanism
    mesh: DeviceMesh
    layout: str
    part: Cache
    """The rows of this process's tokens, first in buffers (b, rows, …), and the states"""
    position: Tensor
    """The position of each row in its sequence, int32 (b, rows)"""
    held: Counts
    """The number of tokens that each process stores of each sequence; empty for states"""
    lengths: tuple[int, ...]
    """The number of tokens of each sequence, over all processes"""
    capacity: int | None
    """The most tokens that fit in a sequence; None for states, which have no limit"""

    @property
    def length(self) -> Tensor:
        """The number of tokens of each sequence, int32 (b,)."""
        return torch.tensor(self.lengths, dtype=torch.int32, device=self.part.length.device)

    @property
    def is_donated(self) -> bool:
        return bool(self.part.kinds) and not self.part.store

    @cached_property
    def token_buffers(self) -> list[str]:
        """The names of the buffers that have a row for each token."""
        return [name for name, kind in kinds_of(self.part).items() if kind.has_tokens]

    def rows_of(self, process: int) -> int:
        """The number of filled rows of a process, in the sequence of which it has most."""
        return max(self.held[process]) if self.held else 0

    def __str__(self) -> str:
        """The properties that are the same on all processes."""
        rows = f", by process {self.held}, of at most {self.capacity}" if self.held else ""
        return f"a cache of {self.mechanism} with {self.lengths} tokens{rows}"


Kept = Mapping[str, Tensor]
"""Rows (b, t, …) of new tokens in `token_buffers`, and new states, by buffer name"""


def tokens_stored(parts: Sequence[TokenPart], counts: Sequence[int], devices: int) -> Counts:
    """The number of tokens on each process, if `counts[i]` tokens of sequence i are valid.

    Examples
    --------
    >>> from precondattn.parallel.layouts import TokenOrder
    >>> tokens_stored(TokenOrder("zigzag").parts([4, 4]), [8, 3], devices=2)
    ((4, 2), (4, 1))
    """
    stored = [[0] * len(counts) for _ in range(devices)]
    for part in parts:
        for sequence, count in enumerate(counts):
            stored[part.device][sequence] += min(max(count - part.first, 0), part.tokens)
    return tuple(map(tuple, stored))


def rows_needed(capacity: int, stored: Sequence[int], devices: int) -> int:
    """The number of rows for a process that stores `stored[i]` tokens of sequence i.

    It gets new tokens only while it has the fewest, so never more than the mean.
    """
    return max(*stored, -(-capacity // devices))


def keepers(stored: Counts, counts: Sequence[int]) -> tuple[list[list[int]], Counts]:
    """The process that stores each of `counts[i]` new tokens of sequence i, and the new numbers.

    Examples
    --------
    >>> keepers(((3, 1), (2, 1)), [2, 1])
    ([[1, 0], [0]], ((4, 2), (3, 1)))
    """
    now = [list(of) for of in stored]
    kept: list[list[int]] = []
    for sequence, count in enumerate(counts):
        kept.append([])
        for _ in range(count):
            fewest = min(range(len(now)), key=lambda process: now[process][sequence])
            now[fewest][sequence] += 1
            kept[-1].append(fewest)
    return kept, tuple(map(tuple, now))


def filled(cache: DividedCache, kept: Kept, positions: Tensor, rank: int) -> DividedCache:
    """An empty cache filled with this process's tokens, which are at `positions` (s,)."""
    count = cache.part.length
    nothing = torch.zeros_like(count)
    is_full = bool(cache.held) and set(cache.held[rank]) == {positions.shape[0]}

    def with_rows(buffer: Tensor, new: Tensor) -> Tensor:
        before = 0 if is_full else None
        return append(buffer, new, nothing, count, donate=True, held=before)

    store = dict(cache.part.store)
    for name, new in kept.items():
        is_rows = name in cache.token_buffers
        store[name] = with_rows(store[name], new) if is_rows else new.to(store[name].dtype)
    position = cache.position
    if cache.token_buffers:
        position = with_rows(position, positions.expand(len(cache.lengths), -1))
    return replace(cache, part=holding(cache.part, count, store), position=position)


def extended(
    cache: DividedCache, kept: Kept, counts: Sequence[int], rank: int, *, donate: bool
) -> DividedCache:
    """The cache after new tokens, of which the first `counts[i]` of sequence i are valid."""
    old, names = cache.part, cache.token_buffers
    store = {n: buffer if n in names else kept[n] for n, buffer in old.store.items()}
    donate_rows = donate and ordinary(old) is old  # Rows of inference mode are copied.
    lengths = tuple(n + new for n, new in zip(cache.lengths, counts, strict=True))
    who, stored = keepers(cache.held, counts) if cache.token_buffers else ([], ())
    kept_here = [[i for i, process in enumerate(of) if process == rank] for of in who]
    count, position = old.length.new_tensor(counts), cache.position
    if donate:
        old.store.clear()  # Before the first write: the cache is refused if one fails.
    if cache.token_buffers:
        most, device = max(map(len, kept_here)), old.length.device
        padded = [of + [0] * (most - len(of)) for of in kept_here]
        chosen = torch.tensor(padded, dtype=torch.int64, device=device)
        count = old.length.new_tensor([*map(len, kept_here)])
        is_same = len({*map(len, kept_here)}) == 1 == len({*cache.held[rank]})
        before = cache.held[rank][0] if is_same else None

        def with_rows(buffer: Tensor, new: Tensor) -> Tensor:
            return append(buffer, new, old.length, count, donate=donate_rows, held=before)

        position = with_rows(position, cache.length[:, None] + chosen)
        for name in cache.token_buffers:
            store[name] = with_rows(store[name], take_tokens(kept[name], chosen))
    part = holding(old, old.length + count, store)
    return replace(cache, part=part, position=position, held=stored, lengths=lengths)
