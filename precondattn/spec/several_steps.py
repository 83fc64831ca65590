"""Several steps of the recurrence for each token: the layout of n steps in a row of s · n.

A token's queries read after its last step, and its decay belongs to the first. The other steps have
queries of 0, whose outputs are dropped, and gates of 0.
"""

from __future__ import annotations

from precondattn.arrays import Array, namespace
from precondattn.frame import Frame
from precondattn.spec.array_functions import where_valid


def joined(x: Array) -> Array:
    """(b, m, s, n, …) to (b, m, s n, …)."""
    b, m, s, n, *rest = x.shape
    return namespace(x).reshape(x, (b, m, s * n, *rest))


def separate(x: Array, n: int) -> Array:
    """(b, m, s n, …) to (b, m, s, n, …)."""
    b, m, steps, *rest = x.shape
    return namespace(x).reshape(x, (b, m, steps // n, n, *rest))


def at_last(x: Array, n: int) -> Array:
    """(b, m, t, …) to (b, m, t n, …): x at the last step of every token, and 0 at the others."""
    return _padded(x, n, last=True)


def at_first(x: Array, n: int) -> Array:
    """(b, m, s, …) to (b, m, s n, …): x at the first step of every token, and 0 at the others."""
    return _padded(x, n, last=False)


def of_last(x: Array, n: int) -> Array:
    """(b, m, t n, …) to (b, m, t, …), the transpose of `at_last`."""
    return x if n == 1 else separate(x, n)[:, :, :, n - 1, ...]


def of_first(x: Array, n: int) -> Array:
    """(b, m, s n, …) to (b, m, s, …), the transpose of `at_first`."""
    return separate(x, n)[:, :, :, 0, ...]


def _padded(x: Array, n: int, *, last: bool) -> Array:
    if n == 1:
        return x
    xp = namespace(x)
    one = x[:, :, :, None, ...]
    b, m, s, _, *rest = one.shape
    zeros = xp.broadcast_to(xp.zeros_like(one), (b, m, s, n - 1, *rest))
    return joined(xp.concat([zeros, one] if last else [one, zeros], axis=3))


def heads_first(x: Array) -> Array:
    """(b, s, n, h, …) to (b, h, s, n, …)."""
    return namespace(x).permute_dims(x, (0, 3, 1, 2, *range(4, x.ndim)))


def heads_last(x: Array) -> Array:
    """(b, h, s, n, …) to (b, s, n, h, …)."""
    return namespace(x).permute_dims(x, (0, 2, 3, 1, *range(4, x.ndim)))


def steps_where_valid(x: Array, n: int, frame: Frame) -> Array:
    """x (b, heads, s n, …), 0 at the steps of padding and of masked keys."""
    return joined(where_valid(separate(x, n), frame))
