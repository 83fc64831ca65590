"""The cache of a layer: the cache of its mechanism, and the last rows for each convolution.

It is one `Cache`. The rows are states with names such as `"convolution of k"`, so that all
operations on caches apply. The position of a new token is the length of the cache.
"""

from __future__ import annotations

from precondattn.arrays import (
    Array,
    Arrays,
    DType,
    arange_like,
    as_index,
    cast,
    in_order,
    namespace,
    placement,
    take_tokens,
)
from precondattn.cache import Cache
from precondattn.cache.kinds import STATE, Kinds
from precondattn.execution.parts import Places
from precondattn.given import at_least
from precondattn.layers.plan import LayerPlan

ROWS = "convolution of "


def empty_cache(
    plan: LayerPlan, like: Array, batch: int, capacity: int | None, dtype: DType
) -> Cache:
    """The empty cache of a layer: its mechanism's, and rows of 0 in `dtype` for each convolution.

    `like` has the dtype and device of the mechanism's inputs.
    """
    xp, batch = namespace(like), at_least(0, "batch", batch)
    shapes, kind = plan.input_shapes(batch), {"dtype": like.dtype, **placement(like)}
    inputs = {name: xp.zeros(shape, **kind) for name, shape in shapes.items()}
    cache = plan.mechanism.init_cache(**inputs, capacity=capacity)
    store, kinds = dict(cache.store), dict(cache.kinds)
    for name, count, shape in plan.histories:
        kind = {"dtype": dtype, **placement(cache.length)}
        store[ROWS + name] = xp.zeros((batch, count, *shape), **kind)
        kinds[ROWS + name] = {STATE: ()}
    return Cache(cache.length, store, kinds)


def split(cache: Cache, plan: LayerPlan) -> tuple[Cache, Arrays]:
    """The cache of the mechanism, and the rows for each convolution, from a layer's cache."""
    if not plan.histories:
        return cache, {}
    rows = {name: cache.store[ROWS + name] for name, _, _ in plan.histories}
    of_rows = {ROWS + name for name in rows}
    inner = {name: array for name, array in cache.store.items() if name not in of_rows}
    kinds = {name: cache.kinds[name] for name in inner}
    return Cache(cache.length, inner, kinds), rows


def joined(inner: Cache, rows: Arrays, kinds: Kinds) -> Cache:
    """The cache of a layer from its two parts; `kinds` are the kinds of the whole cache."""
    if not rows:
        return inner
    store = {**inner.store, **{ROWS + name: array for name, array in rows.items()}}
    return Cache(inner.length, store, {**kinds, **inner.kinds})


class Histories:
    """The rows before the new tokens of one call, and the rows to keep for the next call."""

    def __init__(
        self, before: Arrays | None, count: Array | None, place: Array | None = None
    ) -> None:
        self.before = before
        """The rows from the cache; None without a cache."""
        self.count = count
        """The number of valid new tokens of each sequence; None if all are."""
        self.place = place
        """The index of each token in its segment; None without segments."""
        self.kept: Arrays = {}
        self.longer: Arrays = {}
        """All rows of a call with a cache: those from the cache, then those of new tokens."""

    def between(self, places: Places) -> Arrays:
        """The rows before each of these places, by buffer name."""
        return {
            ROWS + name: places.rows_before(longer, self.kept[name].shape[1])
            for name, longer in self.longer.items()
        }

    def preceded(self, name: str, rows: Array, number: int) -> Array:
        """The rows (b, t, …) of new tokens, with the `number` rows before them in front."""
        xp = namespace(rows)
        if self.before is None:
            before = xp.zeros_like(rows[:, :1, ...])  # It has the sharding of the rows.
            return xp.concat([*[before] * number, rows], axis=1)
        before = self.before[name]
        longer = xp.concat([cast(before, rows.dtype), rows], axis=1)
        if self.count is None:
            last = longer[:, longer.shape[1] - number :, ...]
            if rows.shape[1] > 1:  # A view would keep the memory of all rows.
                last = in_order(last)
        else:
            index = arange_like(number, self.count)[None, :] + self.count[:, None]
            last = take_tokens(longer, as_index(index))
        self.kept[name] = cast(last, before.dtype)
        self.longer[name] = longer
        return longer
