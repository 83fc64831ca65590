"""Outlook attention (VOLO): the windows of some rows of the grid are one batch of products.

    slots:   w strided slices of an image of the values, with a border of zeros
    A slots: added to an image of the outputs, by the same slices

with weights A per window. Only logits that are averaged over cells are rearranged. The gradient
recomputes the weights, and slices the cotangent as the forward pass slices the values; there are
no residuals.

Each packed sequence has its own grid. The core divides a packed call into batches of single
sequences. If it can not, because a compiler traces the call, the definition is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import product

import precondattn as pa
from precondattn.arrays import Array, Arrays, Index, Residuals, cast, namespace, placement
from precondattn.frame import Frame
from precondattn.spec.array_functions import transpose
from precondattn.spec.whole_sequence import valid_as_both
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.arithmetic import Arithmetic, changed_at
from precondattn_portable.layout import blocks, budget, only_at, padded

Rows = tuple[int, int]
"""The first row of windows, and the one after the last."""


class OutlookRows(Algorithm[pa.Outlook]):
    """Algorithm of `Outlook`."""

    name = "rows of windows"

    @property
    def entries_together(self) -> int:
        """Entries of weights, slots and outputs that are computed together."""
        return self.ops.sizes.row_block_entries

    def call(self, x: Arrays, frame: Frame) -> OutlookCall:
        return OutlookCall(self.ops, self.leaf, x, frame)

    def add(self, image: Array, where: Index, x: Array) -> Array:
        """image[where] += x; the image."""
        changed_at(self.ops.add, image, where, x)
        return image

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        if frame.k_segment is not None:
            out, residuals = self.leaf.forward(x, frame)
            return out, residuals
        call = self.call(x, frame)
        v = call.image(x["v"])
        o = self.ops.zeros(v.shape, v)
        for rows in call.blocks(self.entries_together):
            y = self.ops.product(call.weights(rows), call.slots(v, rows))
            o = self._folded(o, call, rows, y)
        return only_at(call.valid, call.tokens(o)), ()

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        gradients: Arrays
        if frame.k_segment is not None:
            gradients = self.leaf.backward(x, frame, out, residuals, cotangent)
            return gradients
        ops, call, xp = self.ops, self.call(x, frame), namespace(cotangent)
        v, d_o = call.image(x["v"]), call.image(cotangent)
        d_v, d_logits = ops.zeros(v.shape, v), []
        for rows in call.blocks(self.entries_together):
            a, d_y = call.weights(rows), call.slots(d_o, rows)
            d_v = self._folded(d_v, call, rows, ops.product(transpose(a), d_y))
            d_a = ops.product(d_y, transpose(call.slots(v, rows)))
            d_logits.append(call.of_tokens(rows, ops.softmax_vjp(a, d_a)))
        together = d_logits[0] if len(d_logits) == 1 else xp.concat(d_logits, axis=1)
        gradients = {"logits": together, "v": _sum_groups(call.tokens(d_v), x["v"].shape[2])}
        return {name: only_at(call.valid, gradient) for name, gradient in gradients.items()}

    def _folded(self, image: Array, call: OutlookCall, rows: Rows, y: Array) -> Array:
        """The image, with the outputs y (b, rows, windows, h, w, e) of each slot added."""
        for i, where in enumerate(call.places(rows)):
            image = self.add(image, where, y[:, :, :, :, i, :])
        return image


def _sum_groups(x: Array, n: int) -> Array:
    """(b, s, h, e) to (b, s, n, e): the sum over the heads that read each value head."""
    if x.shape[2] == n:
        return x
    xp = namespace(x)
    return xp.sum(xp.reshape(x, (*x.shape[:2], n, -1, x.shape[3])), axis=3)


class OutlookCall:
    """The arrays of a call as images (b, rows, columns, h, …), and their windows.

    A sequence without a grid is a grid of one column.
    """

    def __init__(self, ops: Arithmetic, leaf: pa.Outlook, x: Arrays, frame: Frame) -> None:
        self.ops, self.leaf, self.x = ops, leaf, x
        self.valid = valid_as_both(frame.q_valid, frame.k_valid)
        self.b, self.s, self.h = x["logits"].shape[:3]
        self.sides, self.cell = ((*n, 1)[:2] for n in (leaf.sides, leaf.cell))
        columns = leaf.columns or 1
        self.shape = -(-self.s // columns), columns
        self.windows = tuple(-(-n // cell) for n, cell in zip(self.shape, self.cell, strict=True))
        self.before = tuple(side // 2 for side in self.sides)

    def blocks(self, entries: int) -> Iterator[Rows]:
        """Rows of windows, in groups of about so many entries."""
        w, e = math.prod(self.sides), self.x["v"].shape[3]
        row = self.b * self.windows[1] * self.h * w * (w + 2 * e)
        return blocks(self.windows[0], max(budget(entries) // row, 1))

    def image(self, x: Array) -> Array:
        """Rows of tokens (b, s, heads, e), 0 at masked ones, as an image with a border of zeros."""
        xp, (rows, columns) = namespace(x), self.shape
        x = padded(only_at(self.valid, x), 0, rows * columns - self.s, axis=1)
        x = xp.reshape(x, (self.b, rows, columns, *x.shape[2:]))
        if x.shape[3] != self.h:
            x = xp.repeat(x, self.h // x.shape[3], axis=3)
        for axis in (0, 1):
            before, last = self.before[axis], (self.windows[axis] - 1) * self.cell[axis]
            after = max(last + self.sides[axis] - before - self.shape[axis], 0)
            x = padded(x, before, after, axis=axis + 1)
        return x

    def tokens(self, image: Array) -> Array:
        """The rows of tokens (b, s, heads, e) of an image: the transpose of `image`."""
        (rows, columns), (above, left) = self.shape, self.before
        image = image[:, above : above + rows, left : left + columns, ...]
        flat = namespace(image).reshape(image, (self.b, rows * columns, *image.shape[3:]))
        return flat[:, : self.s, ...]

    def places(self, rows: Rows) -> Iterator[Index]:
        """The index of each slot of these windows in an image."""
        (start, stop), (down, right) = rows, self.cell
        for i, j in product(*map(range, self.sides)):
            first, last = start * down + i, (stop - 1) * down + i
            of_row = slice(j, (self.windows[1] - 1) * right + j + 1, right)
            yield slice(None), slice(first, last + 1, down), of_row, ...

    def slots(self, image: Array, rows: Rows) -> Array:
        """The tokens of each slot of these windows, (b, rows, windows, h, w, e)."""
        return namespace(image).stack([image[where] for where in self.places(rows)], axis=4)

    def weights(self, rows: Rows) -> Array:
        """A (b, rows, windows, h, w, w) of these windows; 0 where there is none."""
        ops, logits = self.ops, self.x["logits"][:, self._tokens(rows), ...]
        scale, count = self.leaf.scale_for(self.x["v"].shape[3]), self._count(rows)
        if self._has_cells:
            valid = None if self.valid is None else self.valid[:, self._tokens(rows)]
            logits = self._sums(only_at(valid, logits), rows)
            scale = scale / self._at_least_one(rows)
        weights = ops.softmax(self._rows_of(logits, rows) * scale)
        return weights if count is None else ops.keep(weights, count > 0, 0.0)

    def of_tokens(self, rows: Rows, d_scores: Array) -> Array:
        """The gradient of the logits of the tokens of these windows, from that of their scores."""
        xp = namespace(d_scores)
        d_logits = self.ops.multiply(d_scores, self.leaf.scale_for(self.x["v"].shape[3]))
        tokens = self._tokens(rows)
        if self._has_cells:
            down, right = self.cell
            d_logits = d_logits / self._at_least_one(rows)
            b, many, windows, *rest = d_logits.shape
            each = xp.reshape(d_logits, (b, many, 1, windows, 1, *rest))
            each = xp.broadcast_to(each, (b, many, down, windows, right, *rest))
            whole = xp.reshape(each, (b, many * down, windows * right, *rest))
            d_logits = whole[:, :, : self.shape[1], ...]
        flat = xp.reshape(d_logits, (self.b, -1, *d_logits.shape[3:]))
        return flat[:, : tokens.stop - tokens.start, ...]

    @property
    def _has_cells(self) -> bool:
        return math.prod(self.cell) > 1

    def _tokens(self, rows: Rows) -> slice:
        start, stop = (row * self.cell[0] * self.shape[1] for row in rows)
        return slice(start, min(stop, self.s))

    def _rows_of(self, x: Array, rows: Rows) -> Array:
        """Rows of tokens, (b, tokens, …), as (b, rows, columns, …); rows of cells as they are."""
        if self._has_cells:
            return x
        whole = padded(x, 0, (rows[1] - rows[0]) * self.shape[1] - x.shape[1], axis=1)
        return namespace(x).reshape(whole, (x.shape[0], -1, self.shape[1], *x.shape[2:]))

    def _sums(self, x: Array, rows: Rows) -> Array:
        """The sums over cells of (b, tokens, …), (b, rows, windows, …)."""
        xp, (down, right), columns = namespace(x), self.cell, self.shape[1]
        cells = (rows[1] - rows[0], down, self.windows[1], right)
        x = padded(x, 0, math.prod(cells[:2]) * columns - x.shape[1], axis=1)
        x = xp.reshape(x, (x.shape[0], math.prod(cells[:2]), columns, *x.shape[2:]))
        x = padded(x, 0, math.prod(cells[2:]) - columns, axis=2)
        return xp.sum(xp.reshape(x, (x.shape[0], *cells, *x.shape[3:])), axis=(2, 4))

    def _count(self, rows: Rows) -> Array | None:
        """The number of tokens in the cell of each window (b or 1, rows, windows, 1, 1, 1); None if
        each has one."""
        if self._counts is None:
            return None
        return self._counts[:, rows[0] : rows[1], :, None, None, None]

    def _at_least_one(self, rows: Rows) -> Array:
        """The divisor of the sums over cells, whose tokens are counted."""
        count = self._count(rows)
        assert count is not None
        return namespace(count).where(count > 0, count, 1.0)

    @cached_property
    def _counts(self) -> Array | None:
        like = self.x["v"]
        if self.valid is None and not self._has_cells and self.s == math.prod(self.shape):
            return None
        if self.valid is not None:
            ones = cast(self.valid, like.dtype)
        else:
            ones = namespace(like).ones((1, self.s), dtype=like.dtype, **placement(like))
        return self._sums(ones, (0, self.windows[0]))
