"""The cache of softmax with a window, which has the last tokens only.

With a window w, a new token reads `reach` = w − 1 cached tokens. The buffers have some more rows:

    rows = reach + 2 spare,    spare = ⌈w / 8⌉.

Row 0 has the token at position `first_token` (b,). So rows are in the order of time, and backends
see an ordinary cache with `length` − `first_token` tokens. When new tokens no longer fit, the last
reach + spare tokens move to the front, once in w / 8 tokens, so that w / 8 can always be cropped.
"""

from __future__ import annotations

from precondattn.arrays import Array, arange_like, in_order, namespace, take_tokens, zero_where_not
from precondattn.cache.kinds import CacheLike, Kind, kinds_of

FIRST = "first_token"
"""The name of the buffer (b,) with the position of row 0, in the cache of a window."""


def spare_of(reach: int) -> int:
    """The number of last tokens that can always be cropped."""
    return -(-(reach + 1) // 8)


def rows_of(reach: int) -> int:
    """The number of rows of the buffers."""
    return reach + 2 * spare_of(reach)


def reach_of(cache: CacheLike) -> int | None:
    """The number of cached tokens that a new token reads; None for a cache without a window."""
    kind = kinds_of(cache).get(FIRST)
    return None if kind is None else kind.window - 1


def dropped(length: Array, reach: int) -> Array:
    """The number of rows to drop from the front (b,), if buffers would have `length` (b,) rows."""
    kept = reach + spare_of(reach)
    return namespace(length).where(length > rows_of(reach), length - kept, length * 0)


def moved_to_front(buffer: Array, kind: Kind, length: Array, drop: Array, rows: int) -> Array:
    """`rows` rows of a buffer from row `drop` (b,) on; rows from `length` (b,) on become 0."""
    xp = namespace(buffer)
    source = arange_like(rows, length)[None, :] + drop[:, None]
    taken = take_tokens(buffer, xp.clip(source, 0, buffer.shape[1] - 1))
    is_held = source < length[:, None]
    is_held = xp.reshape(is_held, (*is_held.shape, *(1,) * (buffer.ndim - 2)))
    if str(buffer.dtype).endswith("bool"):
        return taken & is_held
    return kind.from_memory_order(in_order(kind.in_memory_order(zero_where_not(is_held, taken))))
