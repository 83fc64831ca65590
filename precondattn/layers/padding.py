"""Padding at any place: the valid tokens of a batch are moved to the front, and back.

Each sequence of a batch is then computed as if it were alone: convolutions, positions, caches and
states never see a token of padding.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn.arrays import Array, as_index, namespace, take_tokens, zero_where_not


class TokenPacking(NamedTuple):
    """The order of the tokens of each sequence, and where each of them has gone."""

    mask: Array
    """(b, t), true for valid tokens."""
    count: Array
    """(b,), the number of valid tokens."""
    order: Array
    """(b, t): the valid tokens in their order, and then the others."""
    place: Array
    """(b, t): the inverse of `order`."""

    def packed(self, x: Array) -> Array:
        """x (b, t, …) with the valid tokens first, and 0 after them."""
        valid = namespace(x).reshape(self.mask, (*self.mask.shape, *(1,) * (x.ndim - 2)))
        return take_tokens(zero_where_not(valid, x), self.order)

    def packed_pairs(self, pairs: Array) -> Array:
        """Pairs (b or 1, h or 1, t, t) with the rows and columns of valid tokens first."""
        xp = namespace(pairs)
        pairs = xp.broadcast_to(pairs, (self.order.shape[0], *pairs.shape[1:]))
        rows = xp.take_along_axis(pairs, self.order[:, None, :, None], axis=2)
        return xp.take_along_axis(rows, self.order[:, None, None, :], axis=3)

    def unpacked(self, y: Array) -> Array:
        """y (b, t, …) with each token in its place again, and 0 for padding."""
        valid = namespace(y).reshape(self.mask, (*self.mask.shape, *(1,) * (y.ndim - 2)))
        return zero_where_not(valid, take_tokens(y, self.place))


def packing(mask: Array) -> TokenPacking:
    """Where each token goes."""
    xp = namespace(mask)
    kept = xp.astype(mask, xp.int32)
    # Not the standard's `cumulative_sum`, which PyTorch's compiler can not follow.
    among_valid = kept.cumsum(1) - 1
    count = xp.astype(xp.sum(kept, axis=1), xp.int32)
    among_others = (1 - kept).cumsum(1) - 1 + count[:, None]
    place = as_index(xp.astype(xp.where(mask, among_valid, among_others), xp.int32))
    order = as_index(xp.argsort(place, axis=1))
    return TokenPacking(mask, count, order, place)
