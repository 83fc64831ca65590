"""The states between new tokens that `extend(..., keep=n)` or `states_every=m` keeps.

A state is kept (`cache/kept.py`) before each of the last
n new tokens, or after each m tokens of a sequence. Leaves that compute states run from one of these
places to the next, and all other leaves run once for all new tokens.

In a ragged batch, the places are in different columns for each sequence. The tokens between two
places are then moved to the front, and form a batch of new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from precondattn.algebra.call import Call, Keeping
from precondattn.arrays import (
    arange_like,
    as_index,
    host_array,
    is_distributed,
    namespace,
    take_tokens,
)
from precondattn.cache import Cache
from precondattn.cache.kept import states_in, with_kept, without_way_back
from precondattn.execution.arguments import BoundCall
from precondattn.execution.cache_checks import check_is_cache
from precondattn.frameworks.types import Array, Arrays


def can_keep(call: Call) -> bool:
    """Whether the cache has states; raises an error if it has buffers that can not be kept."""
    owner, cache = call.mechanism, call.cache
    assert call.keeping is not None
    (option,) = call.keeping.options
    check_is_cache(str(owner), cache)
    if is_distributed((cache.length,), {}):
        raise TypeError(f"{owner}: DTensors have no {option}")
    others = without_way_back(cache)
    if others:
        raise ValueError(
            f"{owner}: {option} is for states; {', '.join(map(repr, others))} of this cache "
            f"can not go back; take a snapshot() before the tokens, and restore() it"
        )
    return bool(states_in(cache))


def needs_lengths(keeping: Keeping, bound: BoundCall, length: Array) -> bool:
    """Whether the parts of a call without `lengths` are ragged, so that its plan must have them."""
    if bound.lengths is not None or not keeping.every:
        return False
    return Places(length, bound.sizes["t"], None, keeping).is_ragged


class Places:
    """The places among new tokens at which states are kept.

    There are `length` (b,) tokens before the t new ones, of which the first `lengths` (b,), or
    all, are valid.
    """

    def __init__(self, length: Array, t: int, lengths: Array | None, keeping: Keeping) -> None:
        self.length, self.t, self.lengths = length, t, lengths
        self.every = keeping.every or 1
        self.columns: list[Array] = []
        """The number of new tokens (b,) before each place; an int if it is the same for all."""
        self.before: Array = 0
        """The number of new tokens before the first place, if there were enough tokens."""
        widths = self._last(keeping.last) if keeping.last else self._every(keeping.every)
        count = len(self.columns)
        self.widths = [widths[0], *[min(self.every, self.t)] * (count - 1), widths[1]][: count + 1]
        """The most tokens of a sequence before the first place, between places, and after."""

    @property
    def is_ragged(self) -> bool:
        return any(not isinstance(column, int) for column in self.columns)

    def _last(self, n: int) -> tuple[int, int]:
        n, count = min(n, self.t), self.lengths
        if count is None:
            self.columns = [*range(self.t - n, self.t)]
            self.before = self.t - n
        else:
            xp = namespace(count)
            self.before = xp.clip(count - n, min=0)
            self.columns = [xp.minimum(self.before + j, count) for j in range(n)]
        return self.t - n, min(self.t, 1)

    def _every(self, m: int) -> tuple[int, int]:
        xp, t = namespace(self.length), self.t
        counts = host_array(self.length)
        self.before = m - self.length % m
        if counts is not None and len({*(counts % m).tolist()}) == 1:
            first = m - int(counts[0]) % m
            self.columns = [*range(first, t + 1, m)]
            return min(first, t), t - self.columns[-1] if self.columns else 0
        most = -(-t // m) if counts is None else max((counts % m + t).tolist(), default=0) // m
        self.columns = [xp.clip(self.before + m * j, max=t) for j in range(most)]
        return min(m, t), min(m, t)

    def rows_before(self, array: Array, count: int) -> Array:
        """The `count` rows before each place, (b, n, count, …), from x (b, count + t, …)."""
        rows = [rows_from(array, column, count) for column in self.columns]
        return stacked(rows) if rows else array[:, None, :count, ...][:, :0, ...]

    def kept_in(self, cache: Cache, states: Arrays) -> Cache:
        """The cache after the new tokens, with the states (b, n, …) at the places."""
        return with_kept(cache, states, self.length + self.before, self.every)


def stacked(states: Sequence[Array]) -> Array:
    """n states (b, …), stacked to (b, n, …)."""
    return namespace(states[0]).stack(states, axis=1)


def rows_from(array: Array, start: Array, width: int) -> Array:
    """Up to `width` rows of each sequence of an array (b, t, …), from `start` (b,) or an int on."""
    if isinstance(start, int):
        return array[:, start : start + width, ...]
    tokens = start[:, None] + arange_like(width, start)[None, :]
    return take_tokens(array, as_index(namespace(tokens).clip(tokens, max=array.shape[1] - 1)))
