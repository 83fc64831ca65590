"""A step of differential attention by a few tokens: both maps read the cache, and V once.

    o = Σ_j a_j v_j − λ Σ_j a'_j v_j,    a = softmax(s q Kᵀ),    a' = softmax(s q' K'ᵀ)

over the cached and the new tokens. The first half of the rows of a tile are the queries q of a
key/value head, the second half its queries q'. They are multiplied with a tile of keys of K and
then of K', so that a product has the queries in registers once; of each row half of the scores
count. Each row has a running maximum, as in `score_tiles.py`, and one product with V serves both
maps (`read_past`). The parts are merged, the new tokens added one at a time, and the maps
subtracted, in float32 (`finish`).

Products of weights have float32's accuracy, because the maps may nearly cancel. Memory limits a
step, not products. Grids: one program per part of the cached tokens and key/value head
(`read_past`), per key/value head (`finish`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from precondattn.backend import Request
from precondattn.cache import Append, Updates
from precondattn.frame import Frame
from precondattn.kernel_backend.attention_options import declined_option
from precondattn.kernel_backend.limits import padded_width
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.softmax import Softmax
from precondattn_triton.configurations import configuration
from precondattn_triton.decoding import splits_of
from precondattn_triton.launching import launch
from precondattn_triton.precision import exact, is_half, product_precision
from precondattn_triton.softmax.score_tiles import mean_and_log
from precondattn_triton.softmax.step_rows import (
    cached_tokens,
    channels_of,
    finite,
    masked,
    new_scores,
    query_tile,
    refuses_step,
    rows_of_step,
    slots_of,
    step_masks,
    valid_slots,
)
from precondattn_triton.tiles import LOG2_E, heads, start_of


@triton.jit(do_not_specialize=["count"])
def read_past(
    q1, q2, keys1, keys2, values, valid, lengths, maxima, sums, totals,
    count, heads, group, t, d, e, scale, window, per_split, valid_b,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """m, Σ 2^{S − m} and Σ 2^{S − m} v of every row of both maps, over one part."""
    HALF: tl.constexpr = ROWS // 2
    split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    row, channel = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    key_channel = tl.arange(0, KEY_WIDTH).to(tl.int64)
    is_first, is_second = row < HALF, tl.arange(0, 2 * TOKENS) >= TOKENS
    rows = query_tile(q1, 0, head, heads, group, t, d, ROWS, KEY_WIDTH)
    rows += query_tile(q2, HALF, head, heads, group, t, d, ROWS, KEY_WIDTH)
    length, begin, end = cached_tokens(lengths, split, per_split, count, b, window, TOKENS)
    position = length + row % HALF // group
    oldest = 0
    if window is not None:
        oldest = length + 1 - window
    start1, start2 = start_of(keys1, b, n), start_of(keys2, b, n)
    value_start = start_of(values, b, n)

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for low in range(begin, end, TOKENS):
        slot = low + tl.arange(0, TOKENS)
        is_read = valid_slots(valid, b, valid_b, slot, end, oldest)
        both = low + tl.arange(0, 2 * TOKENS) % TOKENS
        read_both = valid_slots(valid, b, valid_b, both, end, oldest)
        key_of = tl.where(
            is_second,
            start2 + both.to(tl.int64) * keys2.token,
            start1 + both.to(tl.int64) * keys1.token,
        )
        step = tl.where(is_second, keys2.channel, keys1.channel)
        at = key_of[:, None] + key_channel[None, :] * step[:, None]
        inside = read_both[:, None] & (key_channel < d)[None, :]
        key_tile = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        scores = tl.dot(rows, tl.trans(key_tile), input_precision=PRECISION)
        scores = tl.where(is_first[:, None] != is_second[None, :], scores, 0.0)
        scores = tl.sum(tl.reshape(scores, (ROWS, 2, TOKENS)), 1) * scale
        scores = masked(scores, is_read, slot, position, window)
        higher = tl.maximum(largest, tl.max(scores, 1))
        base = finite(higher)
        shrink, p = tl.exp2(largest - base), tl.exp2(scores - base[:, None])
        weight = weight * shrink + tl.sum(p, 1)
        tile = slots_of(values, value_start, slot, is_read, e, WIDTH)
        total = tl.dot(p, tile, total * shrink[:, None], input_precision=EXACT)
        largest = higher
    at = (head * tl.num_programs(0) + split) * ROWS + row
    tl.store(maxima + at, largest)
    tl.store(sums + at, weight)
    tl.store(totals + at[:, None] * WIDTH + channel[None, :], total)


@triton.jit
def merged(
    q, k, v, new_valid, is_token, maxima, sums, totals, first,
    splits, b, head, heads, group, t, d, e, scale, window, new_b, token_b,
    ROWS: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The output (rows, e) of one map, whose rows begin at `first` in the parts."""
    HALF: tl.constexpr = ROWS // 2
    n = head % heads
    row, channel = tl.arange(0, HALF), tl.arange(0, WIDTH)
    largest = tl.full((HALF,), float("-inf"), tl.float32)
    weight = tl.zeros((HALF,), tl.float32)
    total = tl.zeros((HALF, WIDTH), tl.float32)
    for split in range(0, splits):
        at = (head * splits + split) * ROWS + first + row
        of_part = tl.load(maxima + at)
        higher = tl.maximum(largest, of_part)
        base = finite(higher)
        shrink, part_weight = tl.exp2(largest - base), tl.exp2(of_part - base)
        weight = weight * shrink + tl.load(sums + at) * part_weight
        part = tl.load(totals + at[:, None] * WIDTH + channel[None, :])
        total = total * shrink[:, None] + part * part_weight[:, None]
        largest = higher
    rows = query_tile(q, 0, head, heads, group, t, d, HALF, KEY_WIDTH)
    for token in range(0, t):
        is_valid = token >= 0
        if new_valid is not None:
            is_valid = tl.load(new_valid + b * new_b + token) != 0
        key = channels_of(k, b, token, n, d, is_valid, KEY_WIDTH)
        value = channels_of(v, b, token, n, e, is_valid, WIDTH)
        score = new_scores(rows, key, scale, is_valid, token, row // group, window)
        higher = tl.maximum(largest, score)
        base = finite(higher)
        shrink, p = tl.exp2(largest - base), tl.exp2(score - base)
        weight = weight * shrink + p
        # A row that may not read the token is not reached by a NaN in it.
        seen = tl.where((score == float("-inf"))[:, None], 0.0, p[:, None] * value[None, :])
        total = total * shrink[:, None] + seen
        largest = higher
    is_row = row < group * t
    if is_token is not None:
        is_row = is_row & (
            tl.load(is_token + b * token_b + row // group, mask=is_row, other=0) != 0
        )
    o, _ = mean_and_log(largest, weight, total, is_row)
    return o


@triton.jit(do_not_specialize=["splits"])
def finish(
    q1, q2, k1, k2, v, lam, new_valid, is_token, maxima, sums, totals, out,
    splits, heads, group, t, d, e, scale, window, lam_b, lam_t, lam_h, new_b, token_b,
    ROWS: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write `out` (b, t, h, e) from the parts of a head and its new tokens."""
    HALF: tl.constexpr = ROWS // 2
    head = tl.program_id(0).to(tl.int64)
    b, n = head // heads, head % heads
    row, channel = tl.arange(0, HALF), tl.arange(0, WIDTH)
    first = merged(
        q1, k1, v, new_valid, is_token, maxima, sums, totals, 0,
        splits, b, head, heads, group, t, d, e, scale, window, new_b, token_b,
        ROWS, KEY_WIDTH, WIDTH,
    )  # fmt: skip
    second = merged(
        q2, k2, v, new_valid, is_token, maxima, sums, totals, HALF,
        splits, b, head, heads, group, t, d, e, scale, window, new_b, token_b,
        ROWS, KEY_WIDTH, WIDTH,
    )  # fmt: skip
    of_head = n * group + row % group
    stored = row < group * t
    at = lam + b * lam_b + (row // group).to(tl.int64) * lam_t + of_head * lam_h
    factor = tl.load(at, mask=stored, other=0.0).to(tl.float32)
    if is_token is not None:  # Padding may have any content.
        of_row = is_token + b * token_b + row // group
        factor = tl.where(tl.load(of_row, mask=stored, other=0) != 0, factor, 0.0)
    o = first - factor[:, None] * second
    at = out + ((b * t + row // group) * heads * group + of_head)[:, None] * e + channel[None, :]
    tl.store(at, o.to(out.dtype.element_ty), mask=stored[:, None] & (channel < e)[None, :])


def refuses_differential_step(
    softmax: Softmax, names: Sequence[str], request: Request
) -> str | None:
    """The reason why there is no step of differential attention for this request, or None."""
    if softmax.read == LOG_MEAN_EXP:
        return "has no step of differential attention with LASER's read"
    reason = declined_option(softmax, "a step of differential attention")
    shapes = dict(request.shapes)
    q, v = shapes[names[0]], shapes[names[4]]
    return reason or refuses_step("differential attention", q, v, request.dtype, maps=2)


def differential_step(
    softmax: Softmax,
    names: Sequence[str],
    past: Mapping[str, Tensor],
    x: Mapping[str, Tensor],
    frame: Frame,
) -> tuple[Tensor, Updates]:
    """The output (b, t, h, e), and the updates. `names` are those of q, k, q', k', v and λ."""
    q1, k1, q2, k2, v, lam = (x[name] for name in names)
    # A slot has the name of the input that it holds.
    cached = names[1], names[3], names[4]
    keys1, keys2, values = (past[name] for name in cached)
    (b, t, h, d), (n, e) = q1.shape, v.shape[2:]
    lam = lam.expand((b, t, h))
    masks = step_masks(frame, b, t, values.shape[1])
    past_b, new_b, token_b = masks.strides
    rows, key_width, width = rows_of_step(q1, n, 2), padded_width(d), padded_width(e)
    tuned = configuration("differential_decode", max(key_width, width), is_half(v.dtype), q1)
    splits, per_split = splits_of(q1, masks.slots, b * n, tuned.columns)
    totals = q1.new_empty((b * n, splits, rows, width), dtype=torch.float32)
    maxima, sums = (totals.new_empty((b * n, splits, rows)) for _ in range(2))
    sizes = n, h // n, t, d, e, softmax.scale_for(d) * LOG2_E.value, softmax.window
    fixed = {"ROWS": rows, "KEY_WIDTH": key_width, "WIDTH": width}
    precision = product_precision(v.dtype)
    launch(
        read_past, (splits, b * n),
        *map(heads, (q1, q2, keys1, keys2, values)), masks.past_valid, masks.lengths,
        maxima, sums, totals, masks.slots, *sizes, per_split, past_b,
        **fixed, TOKENS=tuned.columns, PRECISION=precision,
        EXACT=exact() if is_half(v.dtype) else precision,
        num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
    out = torch.empty((b, t, h, e), dtype=v.dtype, device=v.device)
    launch(
        finish, (b * n,),
        *map(heads, (q1, q2, k1, k2, v)), lam, masks.new_valid, masks.is_token,
        maxima, sums, totals, out, splits, *sizes, *lam.stride(), new_b, token_b, **fixed,
    )  # fmt: skip
    return out, {name: Append(x[name]) for name in cached}
