"""Padding anywhere in a batch: valid tokens are moved to the front, and back afterwards.

Convolutions, positions, caches and states thus never see padding, and each sequence is computed as
if it were alone.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn.arrays import Array, as_index, namespace, take_tokens, zero_where_not


class TokenPacking(NamedTuple):
    """The permutation of each sequence's tokens that moves valid tokens to the front."""

    mask: Array
    """True for valid tokens (b, t)."""
    count: Array
    """The number of valid tokens (b,)."""
    order: Array
    """The indices (b, t) of the valid tokens in their order, followed by the others."""
    place: Array
    """The inverse of `order` (b, t)."""

    def packed(self, x: Array) -> Array:
        """x (b, t, …) with the valid tokens first, and 0 after them."""
        valid = namespace(x).reshape(self.mask, (*self.mask.shape, *(1,) * (x.ndim - 2)))
        return take_tokens(zero_where_not(valid, x), self.order)

    def packed_pairs(self, pairs: Array) -> Array:
        """A mask of pairs (b or 1, h or 1, t, t) with rows and columns of valid tokens first."""
        xp = namespace(pairs)
        pairs = xp.broadcast_to(pairs, (self.order.shape[0], *pairs.shape[1:]))
        rows = xp.take_along_axis(pairs, self.order[:, None, :, None], axis=2)
        return xp.take_along_axis(rows, self.order[:, None, None, :], axis=3)

    def unpacked(self, y: Array) -> Array:
        """y (b, t, …) with the tokens in their original places, and 0 for padding."""
        valid = namespace(y).reshape(self.mask, (*self.mask.shape, *(1,) * (y.ndim - 2)))
        return zero_where_not(valid, take_tokens(y, self.place))


def packing(mask: Array) -> TokenPacking:
    """The permutation for a mask (b, t)."""
    xp = namespace(mask)
    kept = xp.astype(mask, xp.int32)
    # Not the standard's `cumulative_sum`, which PyTorch's compiler can not follow.
    among_valid = kept.cumsum(1) - 1
    count = xp.astype(xp.sum(kept, axis=1), xp.int32)
    among_others = (1 - kept).cumsum(1) - 1 + count[:, None]
    place = as_index(xp.astype(xp.where(mask, among_valid, among_others), xp.int32))
    order = as_index(xp.argsort(place, axis=1))
    return TokenPacking(mask, count, order, place)
