"""A step of LASER by a few tokens: the cache is read once, by many programs, and exactly.

    o_ic = L_ic − log Σ_j e^{S_ij},    L_ic = log Σ_j e^{S_ij + v_jc}

over the cached and the new tokens; S has the options of `score_options.py`. For a tile of cached
tokens in which the values of each channel differ by at most R, with m_i and ν_c the maxima of S and
v in the tile, one product gives all sums,

    Σ_j e^{S_ij + v_jc} = e^{m_i + ν_c} Σ_j e^{S_ij − m_i} e^{v_jc − ν_c},

of which none underflows: that over j is at least e^{−R}. A tile with values further apart is read
one token at a time. Either way the sums are added with a running maximum for each row and channel,
so that the result does not depend on R, nor on the tiles (`read_past`). The parts are merged, and
the new tokens added one at a time, in the same way (`finish`).

Exponents are relative to the running maximum of a row's scores, and in units of log 2. Products of
weights have float32's accuracy: where values are small, the logarithm would magnify an error.
Memory limits a step, not products. Grids: one program per part of the cached tokens and key/value
head (`read_past`), per key/value head (`finish`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from precondattn.backend import Request
from precondattn.cache import Append, Updates
from precondattn.frame import Frame
from precondattn.kernel_backend.attention_options import BIAS, SLOPES, SOFTCAP, declined_option
from precondattn.kernel_backend.limits import MOST_HEADS, padded_width
from precondattn.spec.laser import RANGE
from precondattn.spec.metric import DOT
from precondattn.spec.softmax import Softmax
from precondattn_triton.configurations import configuration
from precondattn_triton.decoding import lengths_of, splits_of, step_masks
from precondattn_triton.launching import launch
from precondattn_triton.precision import exact, is_half, product_precision
from precondattn_triton.softmax.score_options import options_of
from precondattn_triton.softmax.step_rows import (
    cached_length,
    cached_tokens,
    channels_of,
    finite,
    masked,
    query_tile,
    sees_new,
    slots_of,
    step_scores,
    valid_slots,
)
from precondattn_triton.tiles import LOG2_E, heads, start_of

SUPPORTED = BIAS, SOFTCAP, SLOPES
"""The options of LASER's kernels, besides a window. It has no sink: its weights sum to one."""

WIDEST = 256
LARGEST_TILE = 8192
"""Elements in a tile of rows that fits every multiprocessor."""
MOST_ROWS = 64

CLOSE = tl.constexpr(RANGE["float32"])


@triton.jit
def with_sums(exponent, total, more_exponent, more):
    """M and Σ 2^{x − M}, after more sums Σ 2^{x − M''} with their own M''; −∞ adds nothing."""
    larger = tl.maximum(exponent, more_exponent)
    base = finite(larger)
    total = total * tl.exp2(exponent - base) + more * tl.exp2(more_exponent - base)
    return larger, total


@triton.jit(do_not_specialize=["count"])
def read_past(
    q, keys, values, valid, lengths, maxima, sums, logs,
    count, heads, group, t, d, e, scale, scoring, per_split, valid_b,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """m and Σ 2^{S − m} of every row, and L − m of every row and channel, over one part."""
    split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    row, channel = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    rows = query_tile(q, head, heads, group, t, d, ROWS, KEY_WIDTH)
    length, begin, end = cached_tokens(lengths, split, per_split, count, b, scoring.window, TOKENS)
    oldest = 0
    if scoring.window is not None:
        oldest = length + 1 - scoring.window
    key_start, value_start = start_of(keys, b, n), start_of(values, b, n)

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    exponent = tl.full((ROWS, WIDTH), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for low in range(begin, end, TOKENS):
        slot = low + tl.arange(0, TOKENS)
        is_read = valid_slots(valid, b, valid_b, slot, end, oldest)
        key_tile = slots_of(keys, key_start, slot, is_read, d, KEY_WIDTH)
        scores = step_scores(
            tl.dot(rows, tl.trans(key_tile), input_precision=PRECISION),
            (row // group)[:, None], slot[None, :], (row < group * t)[:, None] & is_read[None, :],
            b, (n * group + row % group)[:, None], length, scale,
            scoring,
        )  # fmt: skip
        scores = masked(scores, is_read, slot, length + row // group, scoring.window)
        of_tile = tl.max(scores, 1)
        higher = tl.maximum(largest, of_tile)
        base = finite(higher)
        moved = largest - base
        p = tl.exp2(scores - finite(of_tile)[:, None])
        weight = weight * tl.exp2(moved) + tl.sum(p, 1) * tl.exp2(of_tile - base)
        exponent += moved[:, None]
        tile = slots_of(values, value_start, slot, is_read, e, WIDTH)
        highest = tl.max(tl.where(is_read[:, None], tile, float("-inf")), 0)
        lowest = tl.min(tl.where(is_read[:, None], tile, float("inf")), 0)
        if tl.max(highest - lowest, 0) <= CLOSE:
            highest = finite(highest)
            w = tl.exp2((tile - highest[None, :]) * LOG2_E)
            part = tl.dot(p, tl.where(is_read[:, None], w, 0.0), input_precision=EXACT)
            of_part = (of_tile - base)[:, None] + (highest * LOG2_E)[None, :]
            exponent, total = with_sums(exponent, total, of_part, part)
        else:
            for j in range(TOKENS):
                is_j = tl.arange(0, TOKENS) == j
                score = tl.sum(tl.where(is_j[None, :], scores, 0.0), 1)
                is_present = tl.max((is_j & is_read).to(tl.int32), 0, keep_dims=True) != 0
                one = low + j + tl.arange(0, 1)
                value = slots_of(values, value_start, one, is_present, e, WIDTH)
                term = (score - base)[:, None] + value * LOG2_E
                exponent, total = with_sums(exponent, total, term, 1.0)
        largest = higher
    at = (head * tl.num_programs(0) + split) * ROWS + row
    tl.store(maxima + at, largest)
    tl.store(sums + at, weight)
    # Without a token it is −∞; a NaN stays one.
    tl.store(logs + at[:, None] * WIDTH + channel[None, :], exponent + tl.log2(total))


@triton.jit(do_not_specialize=["splits", "count"])
def finish(
    q, k, v, new_valid, is_token, lengths, maxima, sums, logs, out,
    splits, count, heads, group, t, d, e, scale, scoring, new_b, token_b,
    ROWS: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write `out` (b, t, h, e) from the parts of a head and its new tokens."""
    head = tl.program_id(0).to(tl.int64)
    b, n = head // heads, head % heads
    row, channel = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    exponent = tl.full((ROWS, WIDTH), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for split in range(0, splits):
        at = (head * splits + split) * ROWS + row
        of_part = tl.load(maxima + at)
        higher = tl.maximum(largest, of_part)
        base = finite(higher)
        shrink, part_weight = tl.exp2(largest - base), tl.exp2(of_part - base)
        weight = weight * shrink + tl.load(sums + at) * part_weight
        log = tl.load(logs + at[:, None] * WIDTH + channel[None, :])
        log += (of_part - base)[:, None]
        exponent, total = with_sums(exponent + (largest - base)[:, None], total, log, 1.0)
        largest = higher

    rows = query_tile(q, head, heads, group, t, d, ROWS, KEY_WIDTH)
    length = cached_length(lengths, count, b)
    for token in range(0, t):
        is_valid = token >= 0
        if new_valid is not None:
            is_valid = tl.load(new_valid + b * new_b + token) != 0
        key = channels_of(k, b, token, n, d, is_valid, KEY_WIDTH)
        value = channels_of(v, b, token, n, e, is_valid, WIDTH) * LOG2_E
        is_visible = sees_new(is_valid, token, row // group, scoring.window)
        score = step_scores(
            tl.sum(rows * key[None, :], 1), row // group, length + token + tl.arange(0, 1),
            (row < group * t) & is_visible, b, n * group + row % group, length, scale,
            scoring,
        )  # fmt: skip
        score = tl.where(is_visible, score, float("-inf"))
        higher = tl.maximum(largest, score)
        base = finite(higher)
        weight = weight * tl.exp2(largest - base) + tl.exp2(score - base)
        term = (score - base)[:, None] + value[None, :]
        exponent, total = with_sums(exponent + (largest - base)[:, None], total, term, 1.0)
        largest = higher

    is_row = weight != 0  # A NaN in a key makes it NaN, which is not 0.
    if is_token is not None:
        of_row = is_token + b * token_b + row // group
        is_row = is_row & (tl.load(of_row, mask=row < group * t, other=0) != 0)
    divisor = tl.where(is_row, weight, 1.0)
    mean = tl.where(is_row[:, None], total, 1.0)
    o = tl.where(is_row[:, None], exponent / LOG2_E, 0.0) + tl.log(mean) - tl.log(divisor)[:, None]
    of_head = n * group + row % group
    at = out + ((b * t + row // group) * heads * group + of_head)[:, None] * e + channel[None, :]
    stored = (row < group * t)[:, None] & (channel < e)[None, :]
    tl.store(at, o.to(out.dtype.element_ty), mask=stored)


def refuses_laser_step(leaf: Softmax, request: Request) -> str | None:
    """The reason why there is no step of LASER for this request, or None."""
    if leaf.metric != DOT:
        return f"has a step of LASER with scores <q, k> only, not of {leaf.name}"
    reason = declined_option(leaf, "a step of LASER", SUPPORTED)
    if reason is not None:
        return reason
    shapes = dict(request.shapes)
    (b, t, h, d), (n, e) = shapes["q"], shapes["v"][2:]
    if 0 in shapes["q"] + shapes["v"]:
        return "its step of LASER supports no empty arrays"
    if b * n > MOST_HEADS:
        return f"its step of LASER supports at most {MOST_HEADS} heads of all sequences"
    rows, width = padded_width(t * (h // n)), padded_width(max(d, e))
    most = MOST_ROWS if request.dtype != "float32" else MOST_ROWS // 2
    if width > WIDEST or rows > most or rows * width > LARGEST_TILE:
        return (
            f"its step of LASER supports d, e <= {WIDEST}, and as many new tokens and query "
            f"heads per key/value head as fit a tile; found d={d}, e={e}, t={t} and {h // n}"
        )
    return None


def laser_step(
    leaf: Softmax, past: Mapping[str, Tensor], x: Mapping[str, Tensor], frame: Frame
) -> tuple[Tensor, Updates]:
    """The output (b, t, h, e), and the updates by slot."""
    q, k, v = x["q"], x["k"], x["v"]
    keys, values = past["key"], past["value"]
    (b, t, h, d), (n, e) = q.shape, v.shape[2:]
    masks = step_masks(frame, b, keys.shape[1])
    lengths = None if frame.held is not None else lengths_of(frame, b)
    past_b, new_b, token_b = masks.strides
    rows, key_width, width = padded_width(t * (h // n)), padded_width(d), padded_width(e)
    tuned = configuration("laser_decode", max(key_width, width), is_half(q.dtype), q)
    splits, per_split = splits_of(q, masks.slots, b * n, tuned.columns)
    logs = q.new_empty((b * n, splits, rows, width), dtype=torch.float32)
    maxima, sums = (logs.new_empty((b * n, splits, rows)) for _ in range(2))
    sizes = n, h // n, t, d, e, leaf.scale_for(d) * LOG2_E.value, options_of(leaf, x, b, h)
    fixed = {"ROWS": rows, "KEY_WIDTH": key_width, "WIDTH": width}
    precision = product_precision(q.dtype)
    launch(
        read_past, (splits, b * n),
        heads(q), heads(keys), heads(values), masks.past_valid, lengths, maxima, sums, logs,
        masks.slots, *sizes, per_split, past_b,
        **fixed, TOKENS=tuned.columns, PRECISION=precision,
        EXACT=exact() if is_half(q.dtype) else precision,
        num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
    out = torch.empty((b, t, h, e), dtype=v.dtype, device=v.device)
    launch(
        finish, (b * n,),
        heads(q), heads(k), heads(v), masks.new_valid, masks.is_token, lengths,
        maxima, sums, logs, out, splits, masks.slots, *sizes, new_b, token_b,
        **fixed,
    )  # fmt: skip
    return out, {"key": Append(k), "value": Append(v)}
