"""Windowed attention (Swin): windows of the same kind are one batch of dense attention.

    gathered:  q, k, v (b, s, h, d) to (b windows, h, w, d);   o by the definition, or a kernel
    returned:  o to (b, s, h, e), by the slot of each token

The grid is padded to whole windows, rolled by the shift, and divided. A window at the border then
has slots without a token, or tokens of two windows that do not attend to each other; such pairs
are masked ("hidden"). All other windows come first, and need no mask. Windows are computed a few at
a time. The gradient recomputes the weights; there are no residuals.

Each packed sequence has its own windows. The core divides a packed call into batches of single
sequences. If it can not, because a compiler traces the call, the definition is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

import precondattn as pa
from precondattn.arrays import Array, Arrays, Residuals, arange_like, namespace, placement
from precondattn.frame import Frame
from precondattn.limits import KEPT
from precondattn.spec.array_functions import log_softmax, repeat_heads, sum_heads, transpose
from precondattn.spec.grid_windows import GridWindows, sum_by_entry
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.read import MEAN
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.layout import budget, padded, time_first, zero_padding


class WindowPart(NamedTuple):
    """Windows of the same kind. The arrays are NumPy's."""

    tokens: np.ndarray
    """(windows, w): a slot without a token has another token of its window, with no pairs"""
    hidden: np.ndarray | None
    """Which pairs do not attend to each other (windows, w, w); None where all do."""

    def some(self, start: int, stop: int) -> WindowPart:
        """The windows start … stop − 1."""
        hidden = None if self.hidden is None else self.hidden[start:stop]
        return WindowPart(self.tokens[start:stop], hidden)


class Partition(NamedTuple):
    """The windows of a call, and the slot of each token."""

    parts: tuple[WindowPart, ...]
    slots: np.ndarray
    """(s,): the slot of each token, over all parts."""


@lru_cache(maxsize=KEPT)
def partition(windows: GridWindows, s: int) -> Partition:
    """The windows of a grid of s tokens."""
    shape = (s,) if windows.columns is None else (-(-s // windows.columns), windows.columns)
    whole = tuple(-(-n // w) * w for n, w in zip(shape, windows.size, strict=True))
    token = np.full(whole, -1)
    inner = np.full(np.prod(shape), -1)
    inner[:s] = np.arange(s)
    token[tuple(slice(n) for n in shape)] = inner.reshape(shape)
    label = np.zeros(whole, dtype=np.int64)
    for axis, (n, w, shift) in enumerate(zip(whole, windows.size, windows.shift, strict=True)):
        of_axis = (np.arange(n) - shift) // w
        along = [-1 if each == axis else 1 for each in range(len(whole))]
        label = label * (n + 2) + of_axis.reshape(along)  # Numbers are −1 to n.
    tokens, labels = (_cut(a, windows) for a in (token, label))
    has_tokens = (tokens >= 0).any(axis=1)
    tokens, labels = tokens[has_tokens], labels[has_tokens]
    is_token = tokens >= 0
    hidden = labels[:, :, None] != labels[:, None, :]
    hidden = hidden | ~is_token[:, :, None] | ~is_token[:, None, :]
    at_border = hidden.any(axis=(1, 2))
    order = np.argsort(at_border, kind="stable")
    tokens, hidden, is_token = tokens[order], hidden[order], is_token[order]
    slots = np.empty(s, dtype=np.int64)
    slots[tokens[is_token]] = np.flatnonzero(is_token)
    first = np.take_along_axis(tokens, is_token.argmax(axis=1)[:, None], axis=1)
    tokens = np.where(is_token, tokens, first)
    plain = len(tokens) - int(at_border.sum())
    kinds = WindowPart(tokens[:plain], None), WindowPart(tokens[plain:], hidden[plain:])
    parts = tuple(part for part in kinds if len(part.tokens))
    return Partition(parts, slots)


def _cut(grid: np.ndarray, windows: GridWindows) -> np.ndarray:
    """A grid, rolled by the shift, as (windows, w)."""
    rolled = np.roll(grid, [-shift for shift in windows.shift], tuple(range(grid.ndim)))
    sides = [side for n, w in zip(grid.shape, windows.size, strict=True) for side in (n // w, w)]
    order = (*range(0, 2 * grid.ndim, 2), *range(1, 2 * grid.ndim, 2))
    return rolled.reshape(sides).transpose(order).reshape(-1, int(np.prod(windows.size)))


class GatheredWindows(NamedTuple):
    """Some windows of a call: queries, keys and values (b windows, heads, w, ·)."""

    part: WindowPart
    scale: float
    q: Array
    """Multiplied by the scale."""
    k: Array
    v: Array
    bias: Array | None
    """(1, h, w, w)"""
    visible: Array | None
    """(b windows, 1, w, w); None where all pairs are visible."""
    all_have_keys: bool
    """True if each slot is known to have a visible key"""


class WindowedBlocks(Algorithm[pa.Windowed]):
    """Algorithm of `Windowed`."""

    name = "blocks of windows"

    def call(self, x: Arrays, frame: Frame) -> WindowedCall:
        return WindowedCall(self.ops, self.leaf, x, frame)

    def scores(self, windows: GatheredWindows) -> Array:
        """S (b windows, h, w, w), −∞ at masked pairs."""
        ops = self.ops
        scores = ops.product(windows.q, transpose(windows.k))
        if windows.bias is not None:
            scores = ops.add(scores, windows.bias)
        return scores if windows.visible is None else ops.keep(scores, windows.visible, -math.inf)

    def weights(self, windows: GatheredWindows) -> Array:
        """A (b windows, h, w, w); 0 in rows without a key."""
        ops, visible = self.ops, windows.visible
        if visible is None or windows.all_have_keys:
            return ops.softmax(self.scores(windows))
        has_keys = namespace(visible).any(visible, axis=-1, keepdims=True)
        # A row without keys is computed as if it had all keys, since a softmax needs one.
        with_keys = windows._replace(visible=visible | ~has_keys)
        return ops.keep(ops.softmax(self.scores(with_keys)), has_keys, 0.0)

    def read(self, windows: GatheredWindows) -> Array:
        """The outputs of some windows, (b windows, h, w, e)."""
        if self.leaf.read == MEAN:
            return self.ops.product(self.weights(windows), windows.v)
        out: Array = self.leaf.read.forward(*log_softmax(self.scores(windows)), windows.v)
        return out

    def pull(
        self, windows: GatheredWindows, out: Array | None, cotangent: Array
    ) -> tuple[Array, Array, Array, Array]:
        """The gradients of scores, queries, keys and values of some windows."""
        ops, v = self.ops, windows.v
        if self.leaf.read != MEAN:
            log_weights, _ = log_softmax(self.scores(windows))
            d_scores, d_v = self.leaf.read.backward(log_weights, v, out, cotangent)
        else:
            a = self.weights(windows)
            d_v = ops.product(transpose(a), cotangent)
            d_scores = ops.softmax_vjp(a, ops.product(cotangent, transpose(v)))
        d_q = ops.multiply(ops.product(d_scores, windows.k), windows.scale)
        return d_scores, d_q, ops.product(transpose(d_scores), windows.q), d_v

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        if frame.k_segment is not None:
            out, residuals = self.leaf.forward(x, frame)
            return out, residuals
        call = self.call(x, frame)
        windows = call.windows(budget(self.ops.sizes.row_block_entries))
        out = call.by_token([call.as_slots(self.read(each)) for each in windows])
        return zero_padding(out[:, call.missing :, ...] if call.missing else out, frame), ()

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        gradients: Arrays
        if frame.k_segment is not None:
            gradients = self.leaf.backward(x, frame, out, residuals, cotangent)
            return gradients
        call, cotangents = self.call(x, frame), (out, zero_padding(cotangent, frame))
        out, cotangent = (padded(a, call.missing, 0, axis=1) for a in cotangents)
        slots: dict[str, list[Array]] = {"q": [], "k": [], "v": []}
        d_bias = None
        for each in call.windows(budget(self.ops.sizes.row_block_entries)):
            o = None if self.leaf.read == MEAN else call.gathered(out, each.part)
            d_scores, *d_rows = self.pull(each, o, call.gathered(cotangent, each.part))
            for (name, parts), rows in zip(slots.items(), d_rows, strict=True):
                parts.append(call.as_slots(sum_heads(rows, x[name].shape[2])))
            if self.leaf.bias:
                summed = namespace(d_scores).sum(d_scores, axis=0)
                d_bias = summed if d_bias is None else d_bias + summed
        gradients = {name: call.by_token(parts) for name, parts in slots.items()}
        gradients["q"] = gradients["q"][:, call.missing :, ...]
        if self.leaf.bias:
            gradients["bias_table"] = sum_by_entry(d_bias, self.leaf.windows.size)
        return gradients


class WindowedCall:
    """The arrays of a call, gathered by window."""

    def __init__(self, ops: Arithmetic, leaf: pa.Windowed, x: Arrays, frame: Frame) -> None:
        self.ops, self.leaf, self.x, self.frame = ops, leaf, x, frame
        self.missing = x["k"].shape[1] - x["q"].shape[1]
        """The number of queries that are prepended, so that each token has one."""

    @cached_property
    def all(self) -> Partition:
        return partition(self.leaf.windows, int(self.x["k"].shape[1]))

    def windows(self, together: int) -> Iterator[GatheredWindows]:
        """All windows, in groups of at most so many scores."""
        leaf, x = self.leaf, self.x
        b, _, h, _ = x["q"].shape
        each = b * h * math.prod(leaf.windows.size) ** 2
        step = max(together // (each * (x["v"].shape[3] if leaf.read == LOG_MEAN_EXP else 1)), 1)
        for kind in self.all.parts:
            for start in range(0, len(kind.tokens), step):
                yield self.some(kind.some(start, start + step))

    def some(self, part: WindowPart) -> GatheredWindows:
        h, scale = self.q.shape[2], self.leaf.scale_for(self.q.shape[3])
        rows = self.ops.multiply(self.gathered(self.q, part), scale)
        k, v = (repeat_heads(self.gathered(self.x[name], part), h) for name in ("k", "v"))
        visible, have_keys = self.visible(part), not self.is_masked and self.is_filled(part)
        return GatheredWindows(part, scale, rows, k, v, self.bias, visible, have_keys)

    @cached_property
    def q(self) -> Array:
        """A query of each token."""
        return padded(self.x["q"], self.missing, 0, axis=1)

    @property
    def is_masked(self) -> bool:
        """Whether some tokens have no query, or are padding or masked keys."""
        frame = self.frame
        return bool(self.missing) or frame.q_valid is not None or frame.k_valid is not None

    def is_filled(self, part: WindowPart) -> bool:
        """Whether all slots have a token."""
        return part.hidden is None or not part.hidden.diagonal(axis1=1, axis2=2).any()

    def index(self, numbers: np.ndarray) -> Array:
        """Integers of the partition as an array of the call's library and device."""
        like = self.x["q"]
        return namespace(like).asarray(numbers, **placement(like))

    def gathered(self, x: Array, part: WindowPart) -> Array:
        """The tokens of some windows: (b, s, heads, ·) as (b windows, heads, w, ·)."""
        xp, w = namespace(x), part.tokens.shape[1]
        slots = xp.take(x, self.index(part.tokens.reshape(-1)), axis=1)
        return self.ops.heads_first(xp.reshape(slots, (-1, w, *x.shape[2:])))

    def as_slots(self, rows: Array) -> Array:
        """(b windows, heads, w, ·) as (b, slots, heads, ·)."""
        rows = time_first(rows)
        return namespace(rows).reshape(rows, (self.x["q"].shape[0], -1, *rows.shape[2:]))

    def by_token(self, slots: list[Array]) -> Array:
        """(b, slots, heads, ·) of all windows as (b, s, heads, ·)."""
        xp = namespace(slots[0])
        together = slots[0] if len(slots) == 1 else xp.concat(slots, axis=1)
        return xp.take(together, self.index(self.all.slots), axis=1)

    def visible(self, part: WindowPart) -> Array | None:
        """Which pairs are visible (b windows, 1, w, w); None for all."""
        xp, b = namespace(self.x["q"]), self.x["q"].shape[0]
        visible = self.never_hidden(part)
        for valid, axis in ((self.is_query(), 3), (self.frame.k_valid, 2)):
            if valid is not None:
                each = xp.broadcast_to(valid, (b, valid.shape[1]))[:, :, None, None]
                slots = xp.expand_dims(self.gathered(each, part)[..., 0], axis=axis)
                visible = slots if visible is None else visible & slots
        return visible

    def is_query(self) -> Array | None:
        """Which tokens have a query that is not padding (b or 1, s); None where all have."""
        valid, count = self.frame.q_valid, self.x["k"].shape[1]
        if valid is None and self.missing:
            valid = arange_like(count - self.missing, self.x["q"])[None, :] >= 0
        return None if valid is None else padded(valid, self.missing, 0, axis=1)

    def never_hidden(self, part: WindowPart) -> Array | None:
        """Which pairs are visible without masks (b windows, 1, w, w); None for all."""
        if part.hidden is None:
            return None
        return self.index(np.tile(~part.hidden, (self.x["q"].shape[0], 1, 1))[:, None])

    @cached_property
    def bias(self) -> Array | None:
        """The table's numbers for each pair of slots, (1, h, w, w)."""
        if not self.leaf.bias:
            return None
        table, windows = self.x["bias_table"], self.leaf.windows
        xp, w = namespace(table), math.prod(windows.size)
        # A window is a grid of its own.
        window = windows._replace(columns=windows.columns and windows.size[1])
        slot = arange_like(w, table)[None, :]
        pairs = xp.take(table, xp.reshape(window.entry(slot, slot), (-1,)), axis=0)
        return xp.reshape(xp.permute_dims(pairs, (1, 0)), (1, table.shape[1], w, w))
