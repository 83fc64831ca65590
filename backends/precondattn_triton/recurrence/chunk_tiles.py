"""Functions that the kernels of a chunkwise recurrence share: decay factors, loads and sums.

    D_ij = e^{g_{j+1} + … + g_i}  (j ≤ i),    reading_i = e^{g_1 + … + g_i},
    writing_j = e^{g_{j+1} + … + g_C},        total = e^{g_1 + … + g_C}.

Every exponent is a sum of gates, never a difference of sums, so that the weak gates after a strong
one lose no digits. A gate of −∞ is replaced by −200, whose exponential is also 0 in float32.

Let m be the number of heads with a state in all sequences, T the number of tokens padded to whole
chunks of C, and r the number of queries per state. Kernels read q (b, heads, t, r, d), k (b, heads,
s, d) and v (b, heads, s, e) with any strides, without a copy; several heads with a state may share
one head of these. The t queries are those of the last tokens. The workspace is contiguous: rows (m,
T, w), numbers (m, T) and states (m, chunks, w, W), with w and W the widths of k and v padded to
whole tiles. Padding tokens have k = 0, v = 0, q = 0, β = 0 and g = 0, so that the workspace needs
no mask.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from precondattn_triton.tiles import load_tokens


class SharedHeads(NamedTuple):
    """A user's array (b, heads, t, …) and its strides, with 0 for an axis of one element or none,
    as an argument of a kernel."""

    array: Tensor
    batch: int
    head: int
    token: int
    row: int
    """The stride between the queries of a token."""
    channel: int
    group: int
    """How many heads with a state share a head of the array."""


class ChunkSizes(NamedTuple):
    """The sizes of a call, as an argument of a kernel."""

    heads: int
    """The heads with a state of one sequence"""
    queries: int
    """r"""
    s: int
    t: int
    tokens: int
    """T"""
    d: int
    e: int
    scale: float


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a b in float32; factors of different dtypes are multiplied as float32."""
    if a.dtype != b.dtype:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def as_factor(x, like):
    """x, rounded to the dtype in which an array of factors is stored."""
    return x.to(like.dtype.element_ty)


@triton.jit
def head_of(x, head, heads):
    """The address of a head of `SharedHeads`."""
    return x.array + head // heads * x.batch + head % heads // x.group * x.head


@triton.jit
def load_head(x, at, start, first, count, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Tokens and channels of the head of `SharedHeads` that begins at `at`; 0 outside the array."""
    return load_tokens(at, start, first, count, width, x.token, x.channel, ROWS, WIDTH)


@triton.jit
def store_rows(array, head, tokens, start, first, tile, STEP: tl.constexpr):
    """Store a tile as columns `first` … of rows `start` … of the workspace (m, T, STEP)."""
    rows = (head * tokens + start).to(tl.int64) + tl.arange(0, tile.shape[0])
    at = rows[:, None] * STEP + first + tl.arange(0, tile.shape[1])[None, :]
    tl.store(array + at, tile.to(array.dtype.element_ty))


@triton.jit
def store_tokens(array, start, first, count, width, token_stride, tile):
    """Store a tile as tokens and channels of one head of an output, without those outside it."""
    token = start + tl.arange(0, tile.shape[0]).to(tl.int64)
    channel = first + tl.arange(0, tile.shape[1]).to(tl.int64)
    is_present = (token >= 0) & (token < count)
    inside = is_present[:, None] & (channel < width)[None, :]
    at = token[:, None] * token_stride + channel[None, :]
    tl.store(array + at, tile.to(array.dtype.element_ty), mask=inside)


@triton.jit
def load_queries(x, at, row, start, first, count, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A block as by `load_head`, of one query of each token."""
    return load_head(x, at + row * x.row, start, first, count, width, ROWS, WIDTH)


@triton.jit
def pairs_of(g, start, SIZE: tl.constexpr, STRICT: tl.constexpr, UNDECAYED: tl.constexpr = False):
    """D of the tokens whose gates begin at `start`; 0 above the diagonal, and on it if STRICT.

    If UNDECAYED, token i reads before its own gate: D_ij = e^{g_{j+1} + … + g_{i−1}}. Without
    gates, D is 1.
    """
    gates = None
    if g is not None:
        row = tl.arange(0, SIZE)
        if UNDECAYED:
            gates = tl.load(g + start + row - 1, mask=row > 0, other=0.0)
        else:
            gates = tl.load(g + start + row)
    return pairs_from(gates, SIZE, STRICT, UNDECAYED)


@triton.jit
def pairs_from(gates, SIZE: tl.constexpr, STRICT: tl.constexpr, UNDECAYED: tl.constexpr = False):
    """D as by `pairs_of`, from the gates of the tokens; if UNDECAYED, of the tokens before them."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    mask = i > j if STRICT else i >= j
    decay = tl.full((SIZE, SIZE), 1.0, tl.float32)
    if gates is not None:
        # Column j accumulates the gates of the tokens after j.
        is_after = i > j + 1 if UNDECAYED else i > j
        decay = tl.exp(tl.cumsum(tl.where(is_after, gates[:, None], 0.0), axis=0))
    return tl.where(mask, decay, 0.0)


@triton.jit
def crossing(pairs, SIZE: tl.constexpr, UNDECAYED: tl.constexpr = False):
    """The gradient of gates from dD ∘ D of pairs (C, C): gate t is in the pairs j < t ≤ i, or
    j < t < i if UNDECAYED."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    before = tl.cumsum(pairs, axis=1) - pairs
    is_after = i > j if UNDECAYED else i >= j
    return tl.sum(tl.where(is_after, before, 0.0), axis=0)
