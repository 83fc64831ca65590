"""Containment of NaN and infinity: they reach only later outputs of their sequence and segment.

Blocked algorithms multiply masked entries by 0, and 0 · NaN is NaN. One bad key (with a NaN or
infinity) would thus reach every query of its block, including earlier ones and other segments. So
before a call the bad rows are set to 0, and after it the outputs that depend on them are set to
NaN:

    nan_i = some bad j ≤ i of the same segment, and, in plain softmax, i − j < window,

for each head that reads the row. These outputs are constants: their cotangents are not used.

`preparation.examined` has the inputs. Entries on the CPU are read; if all are finite, nothing else
is done. Other entries are not read: there, the call always includes the selection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from precondattn.algebra.declaration import Pattern
from precondattn.algebra.piece import Piece
from precondattn.arrays import (
    arange_like,
    cast,
    differs_from_previous,
    gathered,
    namespace,
    running_maximum,
    zero_where_not,
)
from precondattn.cache import Append, Cache, Replace, Rewrite, Update
from precondattn.execution.preparation import relating_leaves
from precondattn.frameworks.framework import good_entries
from precondattn.frameworks.types import Array, Arrays, ByName
from precondattn.limits import KEPT

if TYPE_CHECKING:
    from precondattn.execution.arguments import BoundCall

HEADS = ("h", "n", "u")
NAN, INF = math.nan, math.inf


class NonFiniteRows(NamedTuple):
    """The bad rows of a call, and the outputs they reach, as masks (b or 1, tokens, heads or 1)."""

    good: Arrays
    """Which rows of each examined input are finite; size 1 along the other axes."""
    by_keys: Array | None
    """The outputs that bad rows of inputs with a key axis reach."""
    outputs: Array
    """The outputs that any bad row reaches: those of `by_keys`, and those of bad queries."""
    output: Pattern
    buffers: Mapping[str, Pattern]

    def cleaned(self, arrays: ByName) -> Arrays:
        """The inputs, or their gradients, with 0 in bad rows."""
        return {
            name: zero_where_not(self.good[name], array) if name in self.good else array
            for name, array in arrays.items()
        }

    def replaced(self, out: Array, value: float) -> Array:
        """The output, or its cotangent, with `value` where a bad row reaches it."""
        return _replaced(out, self.outputs, self.output, value)

    def marked_update(self, key: str, update: Update) -> Update:
        """The update of a buffer with NaN from the first bad token on."""
        if self.by_keys is None:
            return update
        pattern = self.buffers[key]
        if isinstance(update, Append):
            return Append(_replaced(update.tokens, self.by_keys, pattern, NAN))
        if isinstance(update, Rewrite):
            heads = namespace(self.by_keys).any(self.by_keys, axis=1, keepdims=True)
            past, tokens = (_replaced(a, heads, pattern, NAN) for a in update)
            return Rewrite(past, tokens)
        return Replace(_replaced(update.value, self.by_keys[:, -1:, :], pattern, NAN))

    def marked_state(self, key: str, state: Array, column: Array) -> Array:
        """The state after the first `column` tokens (an int or (b,)), NaN after a bad token."""
        if self.by_keys is None:
            return state
        xp, by_keys = namespace(self.by_keys), self.by_keys
        position = arange_like(by_keys.shape[1], by_keys)[None, :, None]
        if not isinstance(column, int):
            column = column[:, None, None]
        heads = xp.any(by_keys & (position < column), axis=1, keepdims=True)
        return _replaced(state, heads, self.buffers[key], NAN)

    def without_states(self, d_states: ByName) -> Arrays:
        """The cotangents of new states, with 0 in the heads whose state is NaN."""
        if self.by_keys is None:
            return dict(d_states)
        heads = self.by_keys[:, -1:, :]
        return {key: _replaced(d, heads, self.buffers[key], 0.0) for key, d in d_states.items()}


def contained(mechanism: Piece, call: BoundCall) -> BoundCall:
    """The call with its bad rows set to 0, and the record of what they reach."""
    if _are_finite(call.inputs, call.prepared.examined, call):
        return call
    non_finite = _non_finite_rows(mechanism, call)
    return call._replace(inputs=non_finite.cleaned(call.inputs), non_finite=non_finite)


def contained_after(mechanism: Piece, call: BoundCall, cache: Cache) -> tuple[BoundCall, Cache]:
    """`contained`, for packed tokens after states; a bad state reaches the first segment.

    Without segments a bad state is not changed, and reaches all tokens.
    """
    call, segment = contained(mechanism, call), call.frame.k_segment
    if segment is None:
        return call, cache
    patterns = _patterns_of_buffers(mechanism)
    if _are_finite(cache.store, patterns, call):
        return call, cache
    store, of_first_segment = dict(cache.store), (segment == segment[:, :1])[:, :, None]
    reached = of_first_segment & ~of_first_segment
    for key, pattern in patterns.items():
        good, bad = _good_and_bad(store[key], pattern, mechanism, call)
        store[key] = zero_where_not(good, store[key])
        reached = reached | (of_first_segment & bad)
    before = call.non_finite or NonFiniteRows({}, None, None, mechanism.program.output, patterns)
    by_keys, outputs = _either(before.by_keys, reached), _either(before.outputs, reached)
    non_finite = before._replace(by_keys=by_keys, outputs=outputs)
    return call._replace(non_finite=non_finite), cache._replace(store=store)


def _non_finite_rows(mechanism: Piece, call: BoundCall) -> NonFiniteRows:
    good: Arrays = {}
    bad: dict[str, Array | None] = {"s": None, "t": None}
    mixes_queries = any(leaf.reads_all_queries for leaf in mechanism.program.leaves)
    for name, pattern in call.prepared.examined.items():
        good[name], of_heads = _good_and_bad(call.inputs[name], pattern, mechanism, call)
        axis = "s" if mixes_queries or "s" in pattern.letters else "t"
        bad[axis] = _either(bad[axis], of_heads)
    by_keys = None if bad["s"] is None else _reached(mechanism, bad["s"], call)
    buffers, output = _patterns_of_buffers(mechanism), mechanism.program.output
    return NonFiniteRows(good, by_keys, _either(by_keys, bad["t"]), output, buffers)


def _either(a: Array | None, b: Array | None) -> Array | None:
    """The union of two masks, either of which may be None."""
    return a if b is None else b if a is None else a | b


def _patterns_of_buffers(mechanism: Piece) -> dict[str, Pattern]:
    return {key: pattern for key, (_, pattern) in mechanism.program.slots.items()}


def _good_and_bad(
    array: Array, pattern: Pattern, mechanism: Piece, call: BoundCall
) -> tuple[Array, Array]:
    """The good rows, with size 1 along the other axes, and the bad rows (b, tokens, heads)."""
    axes, output, xp = _row_axes(pattern), mechanism.program.output, namespace(array)
    others = tuple(axis for axis in range(array.ndim) if axis not in axes)
    framework = call.prepared.framework
    if others:
        good = framework.good_along(array, others, pattern.low)
    else:
        good = good_entries(array, pattern.low)
    rows = xp.permute_dims(good, (*[axis for axis in axes if axis is not None], *others))
    rows = xp.reshape(rows, tuple(1 if axis is None else good.shape[axis] for axis in axes))
    axis = _row_axes(output)[2]
    heads = 1 if axis is None else output.axes[axis].size(call.sizes)
    return good, _to_heads(xp.logical_not(rows), heads)


def _are_finite(arrays: Arrays, patterns: Mapping[str, Pattern], call: BoundCall) -> bool:
    """Whether all entries are known to be good; only entries on the CPU are read."""
    framework = call.prepared.framework
    if patterns and call.prepared.request.device != "cpu":
        return False
    for name, pattern in patterns.items():
        if not framework.are_finite(arrays[name], pattern.low):
            return False
    return True


@lru_cache(maxsize=KEPT)
def _row_axes(pattern: Pattern) -> list[int | None]:
    """The axes of batch, tokens and heads."""
    groups = (("b",), ("t", "s", "c"), HEADS)
    return [next((i for i, x in enumerate(pattern.letters) if x in g), None) for g in groups]


def _as_declared(rows: Array, pattern: Pattern) -> Array:
    """A mask (b or 1, tokens, heads or 1) with a pattern's axes; size 1 along the others."""
    axes, shape = _row_axes(pattern), [1] * len(pattern.axes)
    if axes == [0, 1, 2]:
        return rows[(..., *(None,) * (len(shape) - 3))]
    for axis, size in zip(axes, rows.shape, strict=True):
        if axis is not None:
            shape[axis] = size
    xp = namespace(rows)
    places = [-1 if axis is None else axis for axis in axes]
    order = sorted(range(3), key=places.__getitem__)
    return xp.reshape(xp.permute_dims(rows, tuple(order)), tuple(shape))


def _replaced(array: Array, rows: Array, pattern: Pattern, value: float) -> Array:
    """The array with `value` in the rows of a mask."""
    axis = _row_axes(pattern)[2]
    mask = _as_declared(_to_heads(rows, 1 if axis is None else array.shape[axis]), pattern)
    xp = namespace(array)
    return cast(xp.where(mask, value, array), array.dtype)  # As in `zero_where_not`.


def _to_heads(bad: Array, heads: int) -> Array:
    """A mask (b, tokens, m) as (b, tokens, heads): repeated, or combined by `any`, per group."""
    xp = namespace(bad)
    b, tokens, m = bad.shape
    if m in (1, heads):
        return bad
    if m < heads:
        shape = (b, tokens, m, heads // m)
        return xp.reshape(xp.broadcast_to(bad[..., None], shape), (b, tokens, heads))
    return xp.any(xp.reshape(bad, (b, tokens, heads, m // heads)), axis=-1)


def _reached(mechanism: Piece, bad: Array, call: BoundCall) -> Array:
    """The outputs (b, t, heads or 1) that depend on bad rows (b or 1, s, heads or 1)."""
    offers = mechanism.offers
    is_softmax = all(leaf.hides_later_keys for leaf in relating_leaves(mechanism))
    window = offers.window if is_softmax else None
    segment = call.frame.k_segment
    if not offers.causal:
        reached = _around(bad, segment, window)
    else:
        reached = _at_or_after(bad, segment, window)
        if call.frame.q_prefix is not None:  # A bad token of a prefix reaches earlier ones.
            reached = reached | _around(_of_prefix(bad, call.frame.q_prefix), segment, None)
    missing = reached.shape[1] - call.sizes.get("t", reached.shape[1])
    return reached[:, missing:, :]


def _of_prefix(bad: Array, q_prefix: Array) -> Array:
    """The bad tokens that are in their segment's prefix."""
    xp = namespace(bad)
    # Keys before the first query are of its segment, or of one that no query reads.
    missing = bad.shape[1] - q_prefix.shape[1]
    first = xp.broadcast_to(q_prefix[:, :1], (q_prefix.shape[0], max(missing, 0)))
    end = xp.concat([first, q_prefix], axis=1)
    return bad & (arange_like(bad.shape[1], bad)[None, :, None] < end[:, :, None])


def _around(bad: Array, segment: Array | None, window: int | None) -> Array:
    """The tokens less than `window` tokens from a bad token of the same segment."""
    xp = namespace(bad)
    flipped = None if segment is None else xp.flip(segment, axis=1)
    before = xp.flip(_at_or_after(xp.flip(bad, axis=1), flipped, window), axis=1)
    return _at_or_after(bad, segment, window) | before


def _at_or_after(bad: Array, segment: Array | None, window: int | None) -> Array:
    """The bad tokens, and those fewer than `window` tokens after one of their segment."""
    xp = namespace(bad)
    bad = gathered(bad, axis=1)
    if segment is None and window is None:
        return xp.cumulative_sum(xp.astype(bad, xp.int32), axis=1) > 0
    position = arange_like(bad.shape[1], bad)[None, :, None]
    last = running_maximum(xp.where(bad, position + 1, 0), axis=1)  # 0 before the first bad token.
    first = 0 * position
    if segment is not None:
        starts = differs_from_previous(segment)
        first = running_maximum(xp.where(starts[:, :, None], position, 0), axis=1)
    if window is not None:
        first = xp.maximum(first, position - (window - 1))
    return last > first
