"""The gradient of LASER's bias: dbias = dS, summed over the heads and sequences that share it.

    close heads    dS = A ∘ (G Wᵀ − D')                        (`laser_backward.py`)
    exact heads    dS_ij = Σ_c do_ic (w_ijc − a_ij)            (`laser_exact.py`)

Grid: one program per tile of pairs of a bias. It computes dS of the tile for one after another of
the heads and sequences that share the bias, and sums in registers: t s (d + e) products for each
close head, half of them if causal, and 2 t s e exponentials for each other one. The query gradient
of a close head has stored dS already if no other head shares its bias.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precondattn_triton.launching import cdiv, launch
from precondattn_triton.precision import product_precision
from precondattn_triton.softmax.bias_tiles import bias_tile_of_program, store_pairs
from precondattn_triton.softmax.laser_call import LaserCall
from precondattn_triton.softmax.laser_exact import (
    exact_channels,
    exact_configuration,
    rows_of_exact_head,
    score_gradient_of_key,
)
from precondattn_triton.softmax.laser_wide import gradient_of_pairs
from precondattn_triton.softmax.reach import keys_in_reach
from precondattn_triton.softmax.score_tiles import load_logs
from precondattn_triton.softmax.visits import tokens_again
from precondattn_triton.tiles import is_token, load_tile

CHUNK = 32
"""The channels that a product of close heads sums over."""


@triton.jit
def _exact_pairs(
    q_tile, k, v, full, d_out, logs, start, end, rows, is_row, batch, head, h,
    k_valid, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
    scale, t, s, k_token, k_channel, v_token, v_channel, o_token, o_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dS of the keys from `start` to `end`, one key and block of channels at a time."""
    d_scores = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, E, CHANNELS):
        o, d_o, sums = rows_of_exact_head(
            full, d_out, rows, is_row, first, h, o_token, o_channel, E, CHANNELS
        )
        for j in range(start, end):
            d_score, _slope, _k_row = score_gradient_of_key(
                q_tile, k, v, o, d_o, sums, logs, j, first, rows, is_row, batch, head,
                k_valid, segment,
                softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
                scale, t, s, k_token, k_channel, v_token, v_channel,
                CAUSAL, D, E, PADDED_D, CHANNELS,
            )  # fmt: skip
            is_column = (start + tl.arange(0, COLUMNS))[None, :] == j
            d_scores += tl.where(is_column, d_score, 0.0)
    return d_scores


@triton.jit
def _bias_gradient(
    q, k, v, w, g, d_sum, is_close, full, log_total, d_out, d_bias, batches, heads,
    q_valid, k_valid, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
    scale, t, s, h, n,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    v_batch, v_token, v_head, v_channel,
    o_batch, o_token, o_head, o_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """`batches` sequences and `heads` heads share an entry of the bias."""
    tile, start, first_batch, first_head = bias_tile_of_program(t, s, h // heads, ROWS, COLUMNS)
    if (batches * heads == 1) & (tl.load(is_close + first_batch * n + first_head // (h // n)) != 0):
        return
    rows = tile * ROWS + tl.arange(0, ROWS)
    columns = start + tl.arange(0, COLUMNS)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in range(0, batches * heads):
        batch, head = first_batch + number // heads, first_head + number % heads
        kv = head // (h // n)
        begin, _low, _high, end = keys_in_reach(
            tile * ROWS, ROWS, batch, t, s, segment, window, CAUSAL, COLUMNS
        )
        if (start >= begin) & (start < end):
            at = (batch * h + head) * t
            is_row = is_token(q_valid, batch, rows, t)
            q_start = q + batch * q_batch + head * q_head
            k_start = k + batch * k_batch + kv * k_head
            if tl.load(is_close + batch * n + kv) != 0:
                is_key = is_token(k_valid, batch, columns, s)
                logs = load_logs(log_total, at, rows, is_row)
                sums = tl.load(d_sum + at + rows, mask=is_row, other=0.0)
                _a, d_scores, _slope = gradient_of_pairs(
                    q_start, g + (batch * t * h + head) * E,
                    rows, is_row, q_token, q_channel, h * E,
                    k_start, w + (batch * n + kv) * s * E, columns, is_key, k_token, k_channel, E,
                    rows[:, None], columns[None, :], is_key[None, :], logs[:, None],
                    sums[:, None], batch, head, segment,
                    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
                    scale, t, s, CAUSAL, D, E, CHUNK, ROWS, COLUMNS, PRECISION, EXACT,
                )  # fmt: skip
                acc += d_scores
            else:
                q_tile = load_tile(
                    q_start, rows, is_row, q_token, q_channel, D, PADDED_D
                ).to(tl.float32)  # fmt: skip
                natural_logs = tl.load(log_total + at + rows, mask=is_row, other=float("inf"))
                acc += _exact_pairs(
                    q_tile, k_start, v + batch * v_batch + kv * v_head,
                    full + (batch * t * h + head) * E, d_out + batch * o_batch + head * o_head,
                    natural_logs[:, None], start, tl.minimum(start + COLUMNS, end),
                    rows, is_row, batch, head, h, k_valid, segment,
                    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
                    scale, t, s, k_token, k_channel, v_token, v_channel, o_token, o_channel,
                    CAUSAL, D, E, PADDED_D, CHANNELS, ROWS, COLUMNS,
                )  # fmt: skip
    rows, columns = tokens_again(tile, ROWS), start + tl.arange(0, COLUMNS)
    at = (first_batch * (h // heads) + first_head) * t
    store_pairs(d_bias, at, rows, columns, s, rows < t, columns < s, acc)


def bias_gradient(
    call: LaserCall,
    w: torch.Tensor,
    of_close: tuple[torch.Tensor, torch.Tensor],
    from_forward: tuple[torch.Tensor, ...],
    d_out: torch.Tensor,
    d_bias: torch.Tensor,
) -> None:
    """Writes dbias (b or 1, h or 1, t, s), except for close heads that share it with no other.

    `of_close` are G and D', and `from_forward` are is_close, o in float32 and λ.
    """
    (b, t, h, _), s = call.q.shape, call.k.shape[1]
    if call.is_wide:
        tuned = exact_configuration("laser_wide_bias_gradient", call)
    else:
        tuned = call.configured("bias_gradient")
    pairs = cdiv(t, tuned.rows) * cdiv(s, tuned.columns)
    launch(
        _bias_gradient, (pairs * d_bias.shape[0] * d_bias.shape[1],),
        call.q, call.k, call.v, w, *of_close, *from_forward, d_out, d_bias,
        b // d_bias.shape[0], h // d_bias.shape[1],
        *call.arguments, *call.v.stride(), *d_out.stride(),
        **call.constants, PADDED_D=call.padded_key, CHANNELS=exact_channels(call), CHUNK=CHUNK,
        ROWS=tuned.rows, COLUMNS=tuned.columns, PRECISION=product_precision(call.v.dtype),
        EXACT=call.is_exact,
        num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
