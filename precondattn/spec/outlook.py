"""Outlook attention: the weights in a window around a token are a linear map of that token alone.

    A_c = softmax(s L_c)  (w, w)
    y_c[i] = Σ_j A_c[i, j] v_{c + δ_j},    o_t = Σ_{c + δ_i = t} y_c[i]

with s = e^{-1/2} unless given. L_c are the logits of the window around token c, for each of its w
slots a row over all of them, and δ_i is how far slot i is from c. The outputs of the windows that
reach a token are summed: the rows of the attention matrix of all tokens sum to their number.

With a stride, a cell of tokens has one window, around its first, and L_c is the mean of the logits
of its tokens. Public code takes the mean before the linear map, which is the same.

A slot without a token has the value 0, and its weight: at the border, the weights of a window sum
to less than 1. So public code pads. Masked tokens are such slots, and in no mean; a cell without
tokens has no window.

In a grid with rows of W tokens, token p is at row ⌊p / W⌋ and column p mod W. Its neighbour at the
offset (r, c) is token p + r W + c, if that is in the same sequence and c does not leave the row.

Source: VOLO (arXiv 2106.13112), 3.1; s and strides are those of its public code.

Gradient, with dy_c[i] = do_{c + δ_i}, and dL from the softmax:

    dA_c[i, j] = dy_c[i] · v_{c + δ_j},    dv_t = Σ_{c + δ_j = t} Σ_i A_c[i, j] dy_c[i].

It is not causal, so it has no cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import ClassVar

from precondattn.algebra import Flops, Inputs, Leaf, Offers, options
from precondattn.arrays import Array, Arrays, ByName, Residuals, cast, namespace, zero_where_not
from precondattn.frame import Frame
from precondattn.spec.array_functions import (
    moved,
    repeat_heads,
    softmax,
    softmax_vjp,
    sum_heads,
    swap_time_and_heads,
    transpose,
)
from precondattn.spec.grid_windows import (
    check_axes,
    check_tokens,
    each_axis,
    positions,
    shortest,
)
from precondattn.spec.whole_sequence import check_same_tokens, segment_numbers, valid_as_both

Offset = tuple[int, ...]


@dataclass(frozen=True)
class Outlook(Leaf):
    """Outlook attention (VOLO): softmax attention among the tokens of a window around each token.

    The input `logits` has a row of w for each of the w slots of the window of each token; there are
    no queries and keys. With fewer value heads than heads of logits (n < h), head i of the logits
    reads value head ⌊i n / h⌋. Tokens are in the order of the grid's rows. `lengths`, `key_mask`
    and packed sequences are honoured; each packed sequence has a grid of its own, so they need a
    grid without a fixed number of rows. It is not causal and has no cache.

    Source: VOLO (arXiv 2106.13112), 3.1.

    Parameters
    ----------
    size : int or pair
        The number w of slots of a window, or its rows and columns: `size=3` or `size=3/5`. Of an
        even number, one more is before the token than after it.
    stride : int or pair
        The side of a cell of tokens, or its rows and columns. A cell has one window, around its
        first token, with the mean of the logits of its tokens. VOLO has 2.
    grid : pair, int or None
        Rows and columns: `grid=14/14` has 196 tokens, and other calls are refused. One number is
        the columns of a grid with as many rows as the tokens fill. None is a sequence, whose
        windows have one axis.
    scale : float, optional
        The factor s of the logits; e^{-1/2} by default.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> v = np.random.default_rng(0).normal(size=(1, 12, 2, 4))
    >>> out = pa.Outlook(size=3, grid=(3, 4))(np.zeros((1, 12, 2, 9, 9)), v)
    >>> image = np.pad(v.reshape(3, 4, 2, 4), ((2, 2), (2, 2), (0, 0), (0, 0)))
    >>> means = sum(image[r : r + 5, c : c + 6] for r in range(3) for c in range(3)) / 9
    >>> windows = sum(means[r : r + 3, c : c + 4] for r in range(3) for c in range(3))
    >>> bool(np.allclose(out[0, [5, 6]], windows.reshape(12, 2, 4)[[5, 6]]))
    True
    """

    name: ClassVar[str] = "outlook"
    output: ClassVar[str] = "b t h e"
    variants: ClassVar[tuple[str, ...]] = (
        "outlook[size=4,stride=3,scale=0.7]",
        "outlook[size=2/3,grid=5]",
        "outlook[stride=2,grid=5]",
    )

    size: tuple[int, ...] = options.counts((3,))
    stride: tuple[int, ...] = options.counts((1,))
    grid: tuple[int, ...] | None = options.counts(None)
    scale: float | None = options.positive_or_none()

    def check_together(self) -> None:
        check_axes(self.name, self.grid, size=self.size, stride=self.stride)
        for option in ("size", "stride"):
            object.__setattr__(self, option, shortest(getattr(self, option)))

    @property
    def _axes(self) -> int:
        return 1 if self.grid is None else 2

    @property
    def sides(self) -> tuple[int, ...]:
        """The size of a window along each axis of the grid."""
        return each_axis(self.size, self._axes)

    @property
    def cell(self) -> tuple[int, ...]:
        """The stride along each axis of the grid."""
        return each_axis(self.stride, self._axes)

    @property
    def columns(self) -> int | None:
        return None if self.grid is None else self.grid[-1]

    @property
    def inputs(self) -> Inputs:
        w = prod(self.sides)
        return Inputs(logits=f"b t h {w} {w}", v="b s n e")

    offers = Offers(causal=False)
    reads_all_queries = True

    def check_call(self, sizes: Mapping[str, int], masks: frozenset[str]) -> None:
        check_same_tokens(self, "windows sum", sizes)
        check_tokens(self, self.grid, sizes["s"], masks)

    def flops(self, sizes: Mapping[str, int]) -> Flops:
        t, columns = sizes["t"], self.columns
        shape = (t,) if columns is None else (-(-t // columns), columns)
        windows = prod(-(-n // side) for n, side in zip(shape, self.cell, strict=True))
        product = 2.0 * windows * prod(self.sides) ** 2 * sizes["e"]
        return Flops(product, 2 * product, 0.0).times(sizes["h"])

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        grid = GridNeighbours(self.columns, frame)
        weights = self._weights(x, grid)[0]
        v = repeat_heads(swap_time_and_heads(x["v"]), weights.shape[1])
        return swap_time_and_heads(self._folded(grid, weights @ self._unfolded(grid, v))), ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        grid = GridNeighbours(self.columns, frame)
        weights, count = self._weights(x, grid)
        v = repeat_heads(swap_time_and_heads(x["v"]), weights.shape[1])
        d_y = self._unfolded(grid, swap_time_and_heads(cotangent))
        d_v = self._folded(grid, transpose(weights) @ d_y)
        d_weights = d_y @ transpose(self._unfolded(grid, v))
        d_mean = self.scale_for(v.shape[3]) * softmax_vjp(weights, d_weights) / count
        d_logits = sum(grid.to(d_mean, offset) for offset in self._of_cell)
        return {
            "logits": swap_time_and_heads(d_logits),
            "v": swap_time_and_heads(sum_heads(d_v, x["v"].shape[2])),
        }

    @property
    def _slots(self) -> list[Offset]:
        """δ of each slot of a window."""
        return offsets(self.sides, centred=True)

    @property
    def _of_cell(self) -> list[Offset]:
        """How far the tokens of a cell are from its first."""
        return offsets(self.cell, centred=False)

    def _weights(self, x: ByName, grid: GridNeighbours) -> tuple[Array, Array]:
        """A (b, h, t, w, w), 0 where there is no window; and of how many tokens its logits are the
        mean, at least 1, (b or 1, 1, t, 1, 1)."""
        xp, logits = namespace(x["logits"]), swap_time_and_heads(x["logits"])
        total = sum(grid.of(logits, offset) for offset in self._of_cell)
        tokens = sum(cast(grid.there(offset), logits.dtype) for offset in self._of_cell)
        count = tokens[:, None, :, None, None]
        is_window = (count > 0) & grid.starts_cell(self.cell)[:, None, :, None, None]
        count = xp.where(count > 0, count, 1.0)
        weights = softmax(self.scale_for(x["v"].shape[3]) * total / count)
        return zero_where_not(is_window, weights), count

    def _unfolded(self, grid: GridNeighbours, x: Array) -> Array:
        """x_{c + δ_i} for each slot i of the window around each token, (b, h, t, w, e)."""
        return namespace(x).stack([grid.of(x, offset) for offset in self._slots], axis=3)

    def _folded(self, grid: GridNeighbours, y: Array) -> Array:
        """Σ_{c + δ_i = t} y_c[i], (b, h, t, e): the transpose of `_unfolded`."""
        slots = enumerate(self._slots)
        return sum(grid.to(y[:, :, :, i, :], offset) for i, offset in slots)


class GridNeighbours:
    """The neighbours of the tokens of a call; rows of tokens are (b, h, t, …).

    Without columns a grid is a sequence, and an offset has one number. Masked tokens are none.
    """

    def __init__(self, columns: int | None, frame: Frame) -> None:
        self.columns = columns
        _, self.position = positions(frame)
        ids = frame.k_segment
        self.segment = None if ids is None else segment_numbers(ids)
        valid = valid_as_both(frame.q_valid, frame.k_valid)
        self.valid = self.position >= 0 if valid is None else valid

    def there(self, offset: Offset) -> Array:
        """Whether each token has a neighbour at this offset, (b or 1, t)."""
        step = self._step(offset)
        there = moved(self.valid, step, axis=1)
        if self.segment is not None:
            there = there & (moved(self.segment, step, axis=1) == self.segment)
        if self.columns is not None:
            column = self.position % self.columns + offset[1]
            there = there & (column >= 0) & (column < self.columns)
        return there

    def starts_cell(self, sides: Sequence[int]) -> Array:
        """Whether each token is the first of a cell, where cells of these sides fill the grid."""
        if self.columns is None:
            return self.position % sides[0] == 0
        row, column = self.position // self.columns, self.position % self.columns
        return (row % sides[0] == 0) & (column % sides[1] == 0)

    def of(self, x: Array, offset: Offset) -> Array:
        """The row of each token's neighbour at an offset; 0 if there is none."""
        return self._only_there(moved(x, self._step(offset), axis=2), offset)

    def to(self, x: Array, offset: Offset) -> Array:
        """The row of each token, moved to its neighbour: the transpose of `of`."""
        return moved(self._only_there(x, offset), -self._step(offset), axis=2)

    def _step(self, offset: Offset) -> int:
        return offset[0] if self.columns is None else offset[0] * self.columns + offset[1]

    def _only_there(self, x: Array, offset: Offset) -> Array:
        there = self.there(offset)
        shape = (there.shape[0], 1, there.shape[1], *(1,) * (x.ndim - 3))
        return zero_where_not(namespace(x).reshape(there, shape), x)


def offsets(sides: Sequence[int], *, centred: bool) -> list[Offset]:
    """The offsets of a window's slots from its token, or of a cell's tokens from its first."""
    return list(product(*(range(-(n // 2) * centred, n - (n // 2) * centred) for n in sides)))
