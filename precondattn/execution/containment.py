"""A NaN or infinity reaches later outputs of its own sequence and segment, and nothing else.

Algorithms in blocks multiply masked entries by 0, and 0 · NaN is NaN: one bad key would reach every
query of its block, earlier ones and those of other segments too. So before a call the bad rows are
set to 0, and after it the outputs that depend on them are set to NaN,

    nan_i = some bad j ≤ i of the same segment, and, in plain softmax, i − j < window,

for each head that reads the row. Outputs that are NaN are constants: their cotangent is not used.

Which inputs are examined follows from the pieces of the call:

=====================  ========================  =====================================
the call               pieces                    inputs examined
=====================  ========================  =====================================
with `segment_ids`     any that relates tokens   all with a token axis
causal                 any with a state or a     all with a key axis, except values:
                       triangular system         keys, directions, gates, β
causal                 softmax alone             none: masked scores are −∞, not 0 · s
=====================  ========================  =====================================

Entries on the CPU are read: if all are finite, nothing else is done. Entries that are traced or on
an accelerator are not waited for: there the zeros and NaN are always selected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from precondattn.algebra.declaration import Pattern
from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.arrays import (
    Array,
    Arrays,
    arange_like,
    cast,
    gathered,
    host_array,
    is_traced,
    library_of,
    namespace,
    running_maximum,
    zero_where_not,
)
from precondattn.cache import Append, Cache, Replace, Rewrite, Update
from precondattn.limits import KEPT

if TYPE_CHECKING:
    from precondattn.algebra.piece import Piece
    from precondattn.execution.arguments import BoundCall

HEADS = ("h", "n", "u")
NAN, INF = math.nan, math.inf


class NonFiniteRows(NamedTuple):
    """The bad rows of a call, and what they reach. Masks are (b or 1, tokens, heads or 1)."""

    good: Arrays
    """Which rows of the examined inputs are finite, of size 1 along the other axes."""
    by_keys: Array | None
    """The outputs that bad rows with a key axis reach."""
    outputs: Array
    """These, and the outputs of bad queries."""
    output: Pattern
    buffers: Mapping[str, Pattern]

    def cleaned(self, arrays: Mapping[str, Array]) -> Arrays:
        """The inputs, or their gradients, with 0 in bad rows."""
        return {
            name: zero_where_not(self.good[name], array) if name in self.good else array
            for name, array in arrays.items()
        }

    def marked(self, out: Array) -> Array:
        """The output, NaN where bad rows reach it."""
        return _replaced(out, self.outputs, self.output, NAN)

    def without(self, cotangent: Array) -> Array:
        """The cotangent of the output, 0 where the output is NaN."""
        return _replaced(cotangent, self.outputs, self.output, 0.0)

    def marked_update(self, key: str, update: Update) -> Update:
        """The update of a buffer, NaN from the first bad token.

        States and rewritten rows have seen all tokens, and are NaN in every head with a bad token.
        """
        if self.by_keys is None:
            return update
        pattern = self.buffers[key]
        if isinstance(update, Append):
            return Append(_replaced(update.tokens, self.by_keys, pattern, NAN))
        if isinstance(update, Rewrite):
            heads = namespace(self.by_keys).any(self.by_keys, axis=1, keepdims=True)
            past, tokens = (_replaced(a, heads, pattern, NAN) for a in update)
            return Rewrite(past, tokens)
        return Replace(_replaced(update.value, self._bad_states(), pattern, NAN))

    def without_states(self, d_states: Mapping[str, Array]) -> Arrays:
        """The cotangents of new states, 0 in the heads whose state is NaN."""
        if self.by_keys is None:
            return dict(d_states)
        heads = self._bad_states()
        return {
            key: _replaced(array, heads, self.buffers[key], 0.0) for key, array in d_states.items()
        }

    def _bad_states(self) -> Array:
        """Heads in which the last token depends on a bad one, which is of its segment."""
        assert self.by_keys is not None
        return self.by_keys[:, -1:, :]


def contained(mechanism: Piece, call: BoundCall) -> BoundCall:
    """The call with its bad rows set to 0, and what they reach."""
    patterns = call.prepared.examined
    is_read = not patterns or call.prepared.request.device == "cpu"
    if is_read and all(
        _is_finite(call.inputs[name], pattern) for name, pattern in patterns.items()
    ):
        return call
    non_finite = _non_finite_rows(mechanism, call, patterns)
    return call._replace(inputs=non_finite.cleaned(call.inputs), non_finite=non_finite)


def contained_after(mechanism: Piece, call: BoundCall, cache: Cache) -> tuple[BoundCall, Cache]:
    """`contained`, of packed tokens after states, which may be bad: they reach the first segment.

    Without segments a bad state is left as it is, and reaches all tokens.
    """
    call, segment = contained(mechanism, call), call.frame.k_segment
    if segment is None:
        return call, cache
    is_read = call.prepared.request.device == "cpu"
    patterns = {key: pattern for key, (_, pattern) in mechanism.program.slots.items()}
    if is_read and all(_is_finite(cache.store[key], p) for key, p in patterns.items()):
        return call, cache
    output, store = mechanism.program.output, dict(cache.store)
    heads, first = _heads(output, call), (segment == segment[:, :1])[:, :, None]
    reached = first & ~first
    for key, pattern in patterns.items():
        rows = _rows(_is_good(store[key], pattern), pattern)
        store[key] = zero_where_not(_as_declared(rows, pattern), store[key])
        reached = reached | (first & _to_heads(namespace(rows).logical_not(rows), heads))
    by_keys, outputs, good = reached, reached, {}
    if call.non_finite is not None:
        good, outputs = call.non_finite.good, reached | call.non_finite.outputs
        by_keys = reached if call.non_finite.by_keys is None else reached | call.non_finite.by_keys
    non_finite = NonFiniteRows(good, by_keys, outputs, output, patterns)
    return call._replace(non_finite=non_finite), cache._replace(store=store)


def _heads(output: Pattern, call: BoundCall) -> int:
    axis = _row_axes(output)[2]
    return 1 if axis is None else output.axes[axis].size(call.sizes)


def _non_finite_rows(
    mechanism: Piece, call: BoundCall, patterns: Mapping[str, Pattern]
) -> NonFiniteRows:
    output = mechanism.program.output
    heads = _heads(output, call)
    good: Arrays = {}
    bad: dict[str, Array] = {}
    mixes_queries = any(leaf.reads_all_queries for leaf in mechanism.program.leaves)
    for name, pattern in patterns.items():
        rows = _rows(_is_good(call.inputs[name], pattern), pattern)
        good[name] = _as_declared(rows, pattern)
        of_heads = _to_heads(namespace(rows).logical_not(rows), heads)
        axis = "s" if mixes_queries or "s" in pattern.letters else "t"
        bad[axis] = bad[axis] | of_heads if axis in bad else of_heads
    by_keys = _reached(mechanism, bad["s"], call) if "s" in bad else None
    by_queries = bad.get("t")
    outputs = by_queries if by_keys is None else by_keys
    if by_keys is not None and by_queries is not None:
        outputs = by_keys | by_queries
    assert outputs is not None
    buffers = {key: pattern for key, (_, pattern) in mechanism.program.slots.items()}
    return NonFiniteRows(good, by_keys, outputs, output, buffers)


@lru_cache(maxsize=KEPT)
def examined(mechanism: Piece, *, is_packed: bool) -> dict[str, Pattern]:
    """The inputs whose NaN or infinities could reach an output that does not depend on them."""
    leaves = _relating_leaves(mechanism)
    patterns = {
        name: pattern
        for name, pattern in mechanism.inputs.items()
        if pattern.time_axis is not None and not pattern.is_pairwise
    }
    if is_packed:
        return patterns if leaves else {}
    if not mechanism.offers.causal or all(leaf.hides_later_keys for leaf in leaves):
        return {}
    return {n: p for n, p in patterns.items() if "s" in p.letters and "e" not in p.letters}


def _relating_leaves(mechanism: Piece) -> list[LeafProtocol]:
    """The leaves that relate tokens to other tokens."""
    return [leaf for leaf in mechanism.program.leaves if leaf.relates_tokens]


def _is_finite(array: Array, pattern: Pattern) -> bool:
    """Whether all entries, on the CPU, are known to be good."""
    if is_traced(array):
        return False
    if library_of(array) == "torch":
        # Ten times as fast. A sum of finite entries may overflow; then the entries are read.
        total = (array.detach() if array.requires_grad else array).sum().item()
        if math.isfinite(total) or (total < INF and pattern.low == -INF):
            return True
    if library_of(array) == "jax" and len(array.devices()) == 1:
        array = host_array(array)  # Not a copy, and JAX would compile two operations for its shape.
    good = namespace(array).all(_is_good(array, pattern))
    # Under `jax.jit`, that of a constant is traced too.
    return not is_traced(good) and bool(good)


def _is_good(array: Array, pattern: Pattern) -> Array:
    """Whether entries are finite. The log-decay −∞, which resets a state, is good too."""
    if pattern.low == -INF:
        return array < INF
    return namespace(array).isfinite(array)


def _row_axes(pattern: Pattern) -> list[int | None]:
    """The axes of batch, tokens and heads."""
    groups = (("b",), ("t", "s", "c"), HEADS)
    return [next((i for i, x in enumerate(pattern.letters) if x in g), None) for g in groups]


def _rows(entries: Array, pattern: Pattern) -> Array:
    """Whether all entries of a row hold, as (b or 1, tokens, heads or 1)."""
    xp = namespace(entries)
    axes = _row_axes(pattern)
    known = [axis for axis in axes if axis is not None]
    others = tuple(axis for axis in range(entries.ndim) if axis not in known)
    rows = xp.all(entries, axis=others) if others else entries
    rows = xp.permute_dims(rows, tuple(sorted(known).index(axis) for axis in known))
    for position, axis in enumerate(axes):
        rows = xp.expand_dims(rows, axis=position) if axis is None else rows
    return rows


def _as_declared(rows: Array, pattern: Pattern) -> Array:
    """(b or 1, tokens, heads or 1) in the order of a pattern's axes, of size 1 along the others."""
    xp = namespace(rows)
    axes = _row_axes(pattern)
    for position in (2, 1, 0):
        rows = xp.squeeze(rows, axis=position) if axes[position] is None else rows
    known = [axis for axis in axes if axis is not None]
    rows = xp.permute_dims(rows, tuple(known.index(axis) for axis in sorted(known)))
    for axis in range(len(pattern.axes)):
        rows = rows if axis in known else xp.expand_dims(rows, axis=axis)
    return rows


def _replaced(array: Array, rows: Array, pattern: Pattern, value: float) -> Array:
    """The array with `value` in some of its rows."""
    axis = _row_axes(pattern)[2]
    mask = _as_declared(_to_heads(rows, 1 if axis is None else array.shape[axis]), pattern)
    xp = namespace(array)
    return cast(xp.where(mask, value, array), array.dtype)  # As in `zero_where_not`.


def _to_heads(bad: Array, heads: int) -> Array:
    """(b, tokens, m) to (b, tokens, heads): to each head of a group, or from any of a group."""
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
    is_softmax = all(leaf.hides_later_keys for leaf in _relating_leaves(mechanism))
    window = offers.window if is_softmax else None
    segment = call.frame.k_segment
    xp = namespace(bad)
    reached = _at_or_after(bad, segment, window)
    if not offers.causal:
        flipped = None if segment is None else xp.flip(segment, axis=1)
        before = _at_or_after(xp.flip(bad, axis=1), flipped, window)
        reached = reached | xp.flip(before, axis=1)
    missing = reached.shape[1] - call.sizes.get("t", reached.shape[1])
    return reached[:, missing:, :]


def _at_or_after(bad: Array, segment: Array | None, window: int | None) -> Array:
    """Tokens at or after a bad one of the same segment, less than `window` tokens after it."""
    xp = namespace(bad)
    position = arange_like(bad.shape[1], bad)[None, :, None]
    bad = gathered(bad, axis=1)
    last = running_maximum(xp.where(bad, position + 1, 0), axis=1)  # 0 where there is none yet.
    first = 0 * position
    if segment is not None:
        is_new = segment[:, 1:] != segment[:, :-1]
        starts = xp.concat([segment[:, :1] != segment[:, :1], is_new], axis=1)
        first = running_maximum(xp.where(starts[:, :, None], position, 0), axis=1)
    if window is not None:
        first = xp.maximum(first, position - (window - 1))
    return last > first
