"""Windowed attention: softmax attention within the windows of a grid of tokens.

    S_ij = s q_i·k_j + table[entry(i, j)],    A = softmax(S),    o = A v

over the keys j in the window of query i (`grid_windows.py`), with s = d^{-1/2} unless given. The
table has one entry for each relative position of two tokens of a window, and each head.
Source: Swin Transformer (arXiv 2103.14030) 3.2 and Eq. 4.

Gradient, with dS from the read (`read.py`, `laser.py`), which is 0 outside the windows:

    dq = s dS k,    dk = s dSᵀ q,    dtable[m] = Σ_{entry(i, j) = m} dS_ij.

Tokens that fill up the last window of an axis do not exist: no query attends to them. Swin's public
code pads with tokens of zeros that every query of their window attends to.

It is not causal, so it has no cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

from precondattn.algebra import Flops, Inputs, Leaf, Offers, ShapeError, options
from precondattn.algebra.flops import pair_flops
from precondattn.arrays import Array, Arrays, ByName, Residuals, as_index, namespace
from precondattn.frame import Frame
from precondattn.spec.array_functions import (
    input_gradients,
    log_softmax,
    mask_scores,
    repeat_heads,
    swap_time_and_heads,
    transpose,
)
from precondattn.spec.grid_windows import (
    GridWindows,
    check_axes,
    check_tokens,
    each_axis,
    positions,
    shortest,
)
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.read import MEAN, Read


@dataclass(frozen=True)
class Windowed(Leaf):
    """Softmax attention within windows of a grid of tokens (Swin): not causal, no cache.

    Tokens are in the order of the grid's rows. Fewer queries than keys are the last tokens.
    `lengths`, `key_mask` and packed sequences are honoured; each packed sequence has a grid of its
    own, so they need a grid without a fixed number of rows.

    Source: Swin Transformer (arXiv 2103.14030) 3.2.

    Parameters
    ----------
    size : int or pair
        The number w of tokens of a window, or its rows and columns: `size=7` or `size=7/7`.
    shift : int or pair
        Where the first whole window starts, σ < w, along each axis: the cyclic shift of Swin.
    grid : pair, int or None
        Rows and columns: `grid=14/14` has 196 tokens, and other calls are refused. One number is
        the columns of a grid with as many rows as the tokens fill. None is a sequence, whose
        windows have one axis. Where w does not divide it, the last window has fewer tokens.
    scale : float, optional
        The factor s of the logits; d^{-1/2} by default.
    bias : bool
        Whether there is an input `bias_table`, ((2 w_r − 1) (2 w_c − 1), h), or (2 w − 1, h)
        without a grid, which is added to the scaled logits.
    read : Mean or LogMeanExp
        The read of the values. `Laser` sets it.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 12, 2, 4))
    >>> out = pa.Windowed(size=2, grid=(3, 4))(q, k, v)
    >>> window = [0, 1, 4, 5]
    >>> alone = pa.Softmax(causal=False)(q[:, window], k[:, window], v[:, window])
    >>> bool(np.allclose(out[:, window], alone))
    True
    """

    name: ClassVar[str] = "windowed"
    output: ClassVar[str] = "b t h e"
    variants: ClassVar[tuple[str, ...]] = (
        "windowed[bias=true]",
        "windowed[size=3,shift=1,scale=0.3]",
        "windowed[size=2/3,shift=1/2,grid=5,bias=true]",
    )

    size: tuple[int, ...] = options.counts((4,))
    shift: tuple[int, ...] = options.counts((0,), lowest=0)
    grid: tuple[int, ...] | None = options.counts(None)
    scale: float | None = options.positive_or_none()
    bias: bool = options.flag(False)
    read: Read = options.one_of(MEAN, LOG_MEAN_EXP)

    def check_together(self) -> None:
        check_axes(self.name, self.grid, size=self.size, shift=self.shift)
        for option in ("size", "shift"):
            object.__setattr__(self, option, shortest(getattr(self, option)))
        windows = self.windows
        for w, shift in zip(windows.size, windows.shift, strict=True):
            if shift >= w:
                raise ValueError(
                    f"{self.name}: shift must be below size along each axis; found shift="
                    f"{windows.shift} and size={windows.size}"
                )
        lengths = () if self.grid is None else self.grid[::-1]
        if any(w > n for w, n in zip(windows.size[::-1], lengths, strict=False)):
            raise ValueError(
                f"{self.name}: windows must fit into the grid; found size={windows.size} and "
                f"grid={self.grid}"
            )

    @property
    def windows(self) -> GridWindows:
        axes = 1 if self.grid is None else 2
        columns = None if self.grid is None else self.grid[-1]
        return GridWindows(each_axis(self.size, axes), each_axis(self.shift, axes), columns)

    @property
    def inputs(self) -> Inputs:
        table = {"bias_table": f"{self.windows.entries} h"} if self.bias else {}
        return Inputs(q="b t h d", k="b s n d", v="b s n e", **table)

    @property
    def offers(self) -> Offers:
        return Offers(scale=self.scale, causal=False, read=self.read.name)

    hides_later_keys = True

    def check_call(self, sizes: Mapping[str, int], masks: frozenset[str]) -> None:
        t, s = sizes["t"], sizes["s"]
        if t > s:
            raise ShapeError(
                f"{self}: the queries are the last tokens of the grid, so there must not be more "
                f"of them than keys; found t = {t} and s = {s}"
            )
        check_tokens(self, self.grid, s, masks)

    def with_read(self, read: Read) -> Windowed:
        return replace(self, read=read)

    def flops(self, sizes: Mapping[str, int]) -> Flops | None:
        keys = min(prod(self.windows.size), sizes["s"])
        pairs = 2.0 * sizes["t"] * keys
        return pair_flops(pairs, keys, sizes["d"], sizes["e"]).times(sizes["h"])

    def _log_weights(self, x: ByName, frame: Frame) -> tuple[tuple[Array, Array], Array]:
        """log A (b, h, t, s) and λ (b, h, t, 1), and the table's entry of each pair."""
        q, k = swap_time_and_heads(x["q"]), swap_time_and_heads(x["k"])
        q_position, k_position = positions(frame)
        entry = self.windows.entry(q_position, k_position)
        scores = self.scale_for(q.shape[3]) * (q @ transpose(repeat_heads(k, q.shape[1])))
        if self.bias:
            table, xp = x["bias_table"], namespace(entry)
            flat = xp.take(table, as_index(xp.reshape(entry, (-1,))), axis=0)
            each = xp.reshape(flat, (*entry.shape, table.shape[1]))
            scores = scores + xp.permute_dims(each, (0, 3, 1, 2))
        visible = self.windows.share(q_position, k_position)[:, None, :, :]
        visible = visible & frame.visible(causal=False)
        return log_softmax(mask_scores(visible, scores)), entry

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        v = repeat_heads(swap_time_and_heads(x["v"]), x["q"].shape[2])
        (log_weights, log_total), _ = self._log_weights(x, frame)
        return swap_time_and_heads(self.read.forward(log_weights, log_total, v)), ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        q, k, v = (swap_time_and_heads(x[name]) for name in ("q", "k", "v"))
        h, n, s = q.shape[1], k.shape[1], self.scale_for(q.shape[3])
        o, d_o = swap_time_and_heads(out), swap_time_and_heads(cotangent)
        (log_weights, _), entry = self._log_weights(x, frame)
        d_scores, d_v = self.read.backward(log_weights, repeat_heads(v, h), o, d_o)
        d_q, d_k = s * (d_scores @ repeat_heads(k, h)), s * (transpose(d_scores) @ q)
        gradients = input_gradients(d_q, d_k, d_v, n)
        if self.bias:
            xp, at, dtype = namespace(d_scores), entry[:, None, :, :], d_scores.dtype
            sums = [
                xp.sum(xp.where(at == m, d_scores, 0.0), axis=(0, 2, 3), dtype=dtype)
                for m in range(self.windows.entries)
            ]
            gradients["bias_table"] = xp.stack(sums, axis=0)
        return gradients
