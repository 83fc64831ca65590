"""The values of close heads in LASER: W = e^{v − ν} − u, and o = ν + log(u + A W) from them.

A kv head of a sequence is *close* if the valid values of each channel differ by at most R. Then,
with ν_c their maximum, no e^{v − ν} underflows. Channels whose values differ by at most log 2 have
u = 1, all others u = 0: this keeps the entries of W, and so their rounding errors, small. ν and u
are computed from all valid keys; a key that a query may not attend to affects only the rounding of
its output. Kernels, in order, and their grids:

    spread       largest and smallest values       one program per segment of tokens and kv head
    weights      W (b, n, s, e), close heads       one program per tile of keys and kv head
    cotangent    G (b, t, h, e) and D'             one program per tile of queries and head

The gradient of close heads is that of softmax attention to W, with

    G = do ∘ e^{ν − o},    dW = Aᵀ G,    dv = (W + u) ∘ dW,    dS = A ∘ (G Wᵀ − D'),
    D'_i = Σ_c G_ic (e^{o_ic − ν_c} − u_c),

where D' also uses the rounded G: then rounding scales the part of each channel in dS, and Σ_j dS_ij
stays 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from precondattn.kernel_backend.limits import padded_width
from precondattn.spec.laser import RANGE
from precondattn_triton.launching import cdiv, launch
from precondattn_triton.tiles import (
    LOG2_E,
    KernelMasks,
    factor_dtype,
    heads,
    is_token,
    load_channels,
    load_tile,
    start_of,
    store_channels,
    tile_of_program,
)

SEGMENT = 256
"""Tokens of a program of `spread`."""

VALUE_ELEMENTS = 4096
"""Elements in a tile of v or o."""


class ValueSpread(NamedTuple):
    """The range of the values of each kv head; of None where attention has no log-mean-exp."""

    shift: torch.Tensor | None = None
    """ν (b, n, e), float32: the maximum of a channel"""
    less: torch.Tensor | None = None
    """u (b, n, e), float32: 1 if the values of a channel differ by at most log 2, else 0"""
    is_close: torch.Tensor | None = None
    """(b, n), int32: whether the values of every channel differ by at most R"""


@triton.jit
def shifts(value_range, head, first, E: tl.constexpr, CHANNELS: tl.constexpr):
    """ν and u of a kv head, in the channels from `first` on."""
    channels = first + tl.arange(0, CHANNELS)
    at = head * E + channels
    nu = tl.load(value_range.shift + at, mask=channels < E, other=0.0)
    u = tl.load(value_range.less + at, mask=channels < E, other=0.0)
    return nu, u


@triton.jit
def log_mean_and_log(
    largest, total, acc, is_row, value_range, head, first, E: tl.constexpr, CHANNELS: tl.constexpr
):
    """o in the channels from `first` on, and λ; 0 and ∞ for rows not valid or without a key."""
    has_keys = is_row & (total != 0)  # A NaN in a key makes it NaN, which is not 0.
    nu, u = shifts(value_range, head, first, E, CHANNELS)
    is_mean = has_keys[:, None] & (first + tl.arange(0, CHANNELS) < E)[None, :]
    mean = tl.where(is_mean, u[None, :] + acc / tl.where(has_keys, total, 1.0)[:, None], 1.0)
    o = tl.where(is_mean, nu[None, :] + tl.log(mean), 0.0)
    logs = largest / LOG2_E + tl.log(tl.where(has_keys, total, 1.0))
    return o, tl.where(has_keys, logs, float("inf"))


@triton.jit
def _spread(
    v, k_valid, largest, smallest, s, n,
    E: tl.constexpr, PADDED_E: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    segments = tl.cdiv(s, SEGMENT)
    segment, batch, head = tile_of_program(segments, n)
    high = tl.full((PADDED_E,), float("-inf"), tl.float32)
    low = tl.full((PADDED_E,), float("inf"), tl.float32)
    for start in range(0, SEGMENT, ROWS):
        tokens = segment * SEGMENT + start + tl.arange(0, ROWS)
        is_key = is_token(k_valid, batch, tokens, s)
        values = load_channels(v, start_of(v, batch, head), tokens, is_key, E, PADDED_E)
        values = values.to(tl.float32)
        high = tl.maximum(high, tl.max(tl.where(is_key[:, None], values, float("-inf")), 0))
        low = tl.minimum(low, tl.min(tl.where(is_key[:, None], values, float("inf")), 0))
    channels = tl.arange(0, PADDED_E)
    at = ((batch * n + head) * segments + segment) * E + channels
    tl.store(largest + at, high, mask=channels < E)
    tl.store(smallest + at, low, mask=channels < E)


@triton.jit
def _weights(
    v, k_valid, value_range, w, s, n,
    E: tl.constexpr, PADDED_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, batch, head = tile_of_program(tl.cdiv(s, ROWS), n)
    if tl.load(value_range.is_close + batch * n + head) == 0:
        return
    tokens = tile * ROWS + tl.arange(0, ROWS)
    is_key = is_token(k_valid, batch, tokens, s)
    nu, u = shifts(value_range, batch * n + head, 0, E, PADDED_E)
    values = load_channels(v, start_of(v, batch, head), tokens, is_key, E, PADDED_E)
    values = values.to(tl.float32)
    result = tl.exp2((values - nu[None, :]) * LOG2_E) - u[None, :]
    result = tl.where(is_key[:, None], result, 0.0)
    store_channels(w + (batch * n + head) * s * E, tokens, tokens < s, E, result, E)


@triton.jit
def _cotangent(
    d_out, full, log_total, value_range, g, d_sum, q_valid, t, h, n,
    E: tl.constexpr, PADDED_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, batch, head = tile_of_program(tl.cdiv(t, ROWS), h)
    kv = head // (h // n)
    if tl.load(value_range.is_close + batch * n + kv) == 0:
        return
    rows = tile * ROWS + tl.arange(0, ROWS)
    is_row = is_token(q_valid, batch, rows, t)
    logs = tl.load(log_total + (batch * h + head) * t + rows, mask=is_row, other=float("inf"))
    has_keys = logs < float("inf")
    start = (batch * t * h + head) * E
    d_o = load_channels(d_out, start_of(d_out, batch, head), rows, has_keys, E, PADDED_E)
    d_o = d_o.to(tl.float32)
    o = load_tile(full + start, rows, has_keys, h * E, E, PADDED_E)
    nu, u = shifts(value_range, batch * n + kv, 0, E, PADDED_E)
    above = tl.where(has_keys[:, None], nu[None, :] - o, 0.0) * LOG2_E
    rounded = (d_o * tl.exp2(above)).to(g.dtype.element_ty)
    sums = tl.sum(rounded.to(tl.float32) * (tl.exp2(-above) - u[None, :]), 1)
    store_channels(g + start, rows, rows < t, h * E, rounded, E)
    tl.store(d_sum + (batch * h + head) * t + rows, sums, mask=rows < t)


def spread(v: torch.Tensor, masks: KernelMasks) -> ValueSpread:
    """The range of the values of valid keys."""
    b, s, n, e = v.shape
    segments = cdiv(s, SEGMENT)
    largest, smallest = v.new_empty((2, b, n, segments, e), dtype=torch.float32)
    launch(
        _spread, (segments * b * n,),
        heads(v), masks.k_valid, largest, smallest, s, n,
        E=e, PADDED_E=padded_width(e), SEGMENT=SEGMENT, ROWS=_value_rows(e),
    )  # fmt: skip
    shift = largest.amax(2)
    apart = shift - smallest.amin(2)
    is_close = (apart <= RANGE["float32"]).all(-1).to(torch.int32)
    # Without a valid key the maximum is −∞; the shift is 0.
    shift = shift.masked_fill(shift.isneginf(), 0.0)
    return ValueSpread(shift, (apart <= math.log(2)).to(torch.float32), is_close)


def weights(v: torch.Tensor, masks: KernelMasks, value_range: ValueSpread) -> torch.Tensor:
    """W (b, n, s, e) of the close heads, 0 for invalid keys; not initialised in other heads."""
    b, s, n, e = v.shape
    w = v.new_empty((b, n, s, e), dtype=factor_dtype(v.dtype))
    rows = _value_rows(e)
    launch(
        _weights, (cdiv(s, rows) * b * n,),
        heads(v), masks.k_valid, value_range, w, s, n,
        E=e, PADDED_E=padded_width(e), ROWS=rows,
    )  # fmt: skip
    return w


def cotangents(
    d_out: torch.Tensor,
    masks: KernelMasks,
    value_range: ValueSpread,
    full: torch.Tensor,
    logs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """G (b, t, h, e) and D' (b, h, t) of the close heads, from o in float32 and λ."""
    b, t, h, e = d_out.shape
    g = d_out.new_empty(d_out.shape, dtype=factor_dtype(d_out.dtype))
    d_sums = torch.empty_like(logs)
    rows = VALUE_ELEMENTS // padded_width(e)
    assert value_range.is_close is not None
    launch(
        _cotangent, (cdiv(t, rows) * b * h,),
        heads(d_out), full, logs, value_range, g, d_sums, masks.q_valid,
        t, h, value_range.is_close.shape[1],
        E=e, PADDED_E=padded_width(e), ROWS=rows,
    )  # fmt: skip
    return g, d_sums


def _value_rows(e: int) -> int:
    """Tokens in a tile of v."""
    return min(VALUE_ELEMENTS // padded_width(e), SEGMENT)
