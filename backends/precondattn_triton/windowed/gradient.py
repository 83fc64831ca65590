"""Attention within windows, backward, from λ, D = rowsum(do ∘ o) and do:

    A = e^{S − λ},    dS = A ∘ (do vᵀ − D),    dq = s dS k,    dk = s dSᵀ q,    dv = Aᵀ do,
    dtable[m] = Σ dS_ij over the pairs of slots with entry m, of all windows and sequences.

Every kernel recomputes A from λ, in tiles. Kernels, and their grids:

    query gradient    dq                 one program per tile of slots, window, head and sequence
    key gradient      dk, dv             the same, per key/value head; it loops over the query heads
    table gradient    Σ_windows dS_ij    one program per pair of tiles, group of windows and head

The last one has the sum of its pairs in registers, and writes it once: (groups, h, W, W) numbers,
which PyTorch sums over groups and then by entry. Atomic additions to the table would save this
workspace, but every window adds to the same few entries, in an order that no two runs share. As it
is, no two programs add to the same element, and the same call gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precondattn.kernel_backend.windows import TOGETHER
from precondattn.spec.grid_windows import sum_by_entry
from precondattn_triton.launching import cdiv, launch
from precondattn_triton.softmax.pair_products import row_products_of
from precondattn_triton.softmax.score_tiles import load_logs
from precondattn_triton.tiles import LOG2_E, load_tile, store_tile
from precondattn_triton.windowed.forward import WindowedArrays
from precondattn_triton.windowed.slots import and_valid, tokens_of, window_of_program, with_bias


@triton.jit
def _query_gradient(
    d_q, d_out, logs, d_sums, g_batch, g_token, g_head, g_channel,
    q, k, v, table, q_valid, k_valid, scale, t, s, h, n,
    windows, across, columns, first_row, first_column,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    v_batch, v_token, v_head, v_channel, table_entry, table_head,
    D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    W_ROWS: tl.constexpr, W_COLUMNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    SLOTS: tl.constexpr = W_ROWS * W_COLUMNS
    tile, window, batch, head = window_of_program(tl.cdiv(SLOTS, ROWS), windows, h)
    kv = head // (h // n)
    row_slot = tile * ROWS + tl.arange(0, ROWS)
    token, in_grid = tokens_of(
        row_slot, window, across, columns, first_row, first_column, s, W_ROWS, W_COLUMNS
    )
    query = token - (s - t)
    is_query = in_grid & (query >= 0)
    is_row = and_valid(is_query, q_valid, batch, query, t)
    at = (batch * h + head) * t
    row_logs = load_logs(logs, at, query, is_row)
    is_row = is_row & (row_logs < float("inf"))
    sums = tl.load(d_sums + at + query, mask=is_row, other=0.0)
    q_tile = load_tile(
        q + batch * q_batch + head * q_head, query, is_row, q_token, q_channel, D, PADDED_D
    )
    d_o = load_tile(
        d_out + batch * g_batch + head * g_head, query, is_row, g_token, g_channel, E, PADDED_E
    ).to(FACTOR)
    k += batch * k_batch + kv * k_head
    v += batch * v_batch + kv * v_head
    acc = tl.zeros((ROWS, PADDED_D), tl.float32)
    for start in range(0, SLOTS, COLUMNS):
        key_slot = start + tl.arange(0, COLUMNS)
        key, is_key = tokens_of(
            key_slot, window, across, columns, first_row, first_column, s, W_ROWS, W_COLUMNS
        )
        is_key = and_valid(is_key, k_valid, batch, key, s)
        k_tile = load_tile(k, key, is_key, k_token, k_channel, D, PADDED_D)
        values = load_tile(v, key, is_key, v_token, v_channel, E, PADDED_E).to(FACTOR)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * (scale * LOG2_E)
        scores = with_bias(
            scores, table, head, row_slot[:, None], key_slot[None, :],
            is_row[:, None] & is_key[None, :], table_entry, table_head, W_ROWS, W_COLUMNS,
        )  # fmt: skip
        a = tl.exp2(scores - row_logs[:, None])
        d_a = tl.dot(d_o, tl.trans(values), input_precision=PRECISION)
        d_s = (a * (d_a - sums[:, None])).to(FACTOR)
        acc = tl.dot(d_s, k_tile.to(FACTOR), acc, input_precision=PRECISION)
    store_tile(d_q + (batch * t * h + head) * D, query, is_query, h * D, acc * scale, D)


@triton.jit
def _key_gradient(
    d_k, d_v, d_out, logs, d_sums, g_batch, g_token, g_head, g_channel,
    q, k, v, table, q_valid, k_valid, scale, t, s, h, n,
    windows, across, columns, first_row, first_column,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    v_batch, v_token, v_head, v_channel, table_entry, table_head,
    D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    W_ROWS: tl.constexpr, W_COLUMNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    SLOTS: tl.constexpr = W_ROWS * W_COLUMNS
    tile, window, batch, kv = window_of_program(tl.cdiv(SLOTS, ROWS), windows, n)
    key_slot = tile * ROWS + tl.arange(0, ROWS)
    key, in_grid = tokens_of(
        key_slot, window, across, columns, first_row, first_column, s, W_ROWS, W_COLUMNS
    )
    is_key = and_valid(in_grid, k_valid, batch, key, s)
    k_tile = load_tile(
        k + batch * k_batch + kv * k_head, key, is_key, k_token, k_channel, D, PADDED_D
    )
    values = load_tile(
        v + batch * v_batch + kv * v_head, key, is_key, v_token, v_channel, E, PADDED_E
    ).to(FACTOR)
    key_acc = tl.zeros((ROWS, PADDED_D), tl.float32)
    value_acc = tl.zeros((ROWS, PADDED_E), tl.float32)
    for member in range(0, h // n):
        head = kv * (h // n) + member
        at = (batch * h + head) * t
        for start in range(0, SLOTS, COLUMNS):
            query_slot = start + tl.arange(0, COLUMNS)
            token, is_query = tokens_of(
                query_slot, window, across, columns, first_row, first_column, s, W_ROWS, W_COLUMNS
            )
            query = token - (s - t)
            is_query = and_valid(is_query & (query >= 0), q_valid, batch, query, t)
            row_logs = load_logs(logs, at, query, is_query)
            is_query = is_query & (row_logs < float("inf"))
            sums = tl.load(d_sums + at + query, mask=is_query, other=0.0)
            q_tile = load_tile(
                q + batch * q_batch + head * q_head,
                query, is_query, q_token, q_channel, D, PADDED_D,
            )  # fmt: skip
            d_o = load_tile(
                d_out + batch * g_batch + head * g_head,
                query, is_query, g_token, g_channel, E, PADDED_E,
            ).to(FACTOR)  # fmt: skip
            # All transposed: keys × queries.
            scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * (scale * LOG2_E)
            scores = with_bias(
                scores, table, head, query_slot[None, :], key_slot[:, None],
                is_query[None, :] & is_key[:, None], table_entry, table_head, W_ROWS, W_COLUMNS,
            )  # fmt: skip
            a = tl.exp2(scores - row_logs[None, :])
            value_acc = tl.dot(a.to(FACTOR), d_o, value_acc, input_precision=PRECISION)
            d_a = tl.dot(values, tl.trans(d_o), input_precision=PRECISION)
            d_s = (a * (d_a - sums[None, :])).to(FACTOR)
            key_acc = tl.dot(d_s, q_tile.to(FACTOR), key_acc, input_precision=PRECISION)
    at = batch * s * n + kv
    store_tile(d_k + at * D, key, in_grid, n * D, key_acc * scale, D)
    store_tile(d_v + at * E, key, in_grid, n * E, value_acc, E)


@triton.jit
def _table_gradient(
    d_pairs, d_out, logs, d_sums, g_batch, g_token, g_head, g_channel, count,
    q, k, v, table, q_valid, k_valid, scale, t, s, h, n,
    windows, across, columns, first_row, first_column,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    v_batch, v_token, v_head, v_channel, table_entry, table_head,
    D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    W_ROWS: tl.constexpr, W_COLUMNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, FACTOR: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """`count` windows of all sequences; d_pairs is (groups, h, W, W)."""
    SLOTS: tl.constexpr = W_ROWS * W_COLUMNS
    ACROSS: tl.constexpr = (SLOTS + COLUMNS - 1) // COLUMNS
    TILES: tl.constexpr = (SLOTS + ROWS - 1) // ROWS * ACROSS
    program = tl.program_id(0)
    tile, head, group = program % TILES, program // TILES % h, program // TILES // h
    kv = (head // (h // n)).to(tl.int64)
    row_slot = tile // ACROSS * ROWS + tl.arange(0, ROWS)
    key_slot = tile % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in range(group * TOGETHER, tl.minimum(count, (group + 1) * TOGETHER)):
        batch, window = (number // windows).to(tl.int64), number % windows
        token, is_row = tokens_of(
            row_slot, window, across, columns, first_row, first_column, s, W_ROWS, W_COLUMNS
        )
        key, is_key = tokens_of(
            key_slot, window, across, columns, first_row, first_column, s, W_ROWS, W_COLUMNS
        )
        is_key = and_valid(is_key, k_valid, batch, key, s)
        query = token - (s - t)
        is_row = and_valid(is_row & (query >= 0), q_valid, batch, query, t)
        at = (batch * h + head) * t
        row_logs = load_logs(logs, at, query, is_row)
        is_row = is_row & (row_logs < float("inf"))
        sums = tl.load(d_sums + at + query, mask=is_row, other=0.0)
        scores = row_products_of(
            q + batch * q_batch + head * q_head, query, is_row, q_token, q_channel,
            k + batch * k_batch + kv * k_head, key, is_key, k_token, k_channel,
            D, PADDED_D, ROWS, COLUMNS, PRECISION,
        ) * (scale * LOG2_E)  # fmt: skip
        scores = with_bias(
            scores, table, head, row_slot[:, None], key_slot[None, :],
            is_row[:, None] & is_key[None, :], table_entry, table_head, W_ROWS, W_COLUMNS,
        )  # fmt: skip
        d_a = row_products_of(
            d_out + batch * g_batch + head * g_head, query, is_row, g_token, g_channel,
            v + batch * v_batch + kv * v_head, key, is_key, v_token, v_channel,
            E, PADDED_E, ROWS, COLUMNS, PRECISION,
        )  # fmt: skip
        acc += tl.exp2(scores - row_logs[:, None]) * (d_a - sums[:, None])
    at = d_pairs + (group.to(tl.int64) * h + head) * SLOTS * SLOTS
    inside = (row_slot < SLOTS)[:, None] & (key_slot < SLOTS)[None, :]
    tl.store(at + row_slot[:, None] * SLOTS + key_slot[None, :], acc, mask=inside)


def window_gradient(
    problem: WindowedArrays, logs: torch.Tensor, d_sums: torch.Tensor, d_out: torch.Tensor
) -> dict[str, torch.Tensor]:
    """dq, dk, dv, and dtable in float32 if there is a table; `d_sums` (b, h, t) is D."""
    b, _, h, _ = problem.q.shape
    n, slots, windows = problem.k.shape[2], problem.size.slots, problem.grid.windows
    d_q, d_k, d_v = (
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (problem.q, problem.k, problem.v)
    )
    from_out = d_out, logs, d_sums, *d_out.stride()
    rest = problem.arguments()
    tuned = problem.tiles("window_query_gradient")
    launch(
        _query_gradient,
        (cdiv(slots, tuned.rows) * windows * b * h,),
        d_q,
        *from_out,
        *rest,
        **problem.constants(tuned),
    )
    tuned = problem.tiles("window_key_gradient")
    launch(
        _key_gradient,
        (cdiv(slots, tuned.rows) * windows * b * n,),
        d_k,
        d_v,
        *from_out,
        *rest,
        **problem.constants(tuned),
    )
    gradients = {"q": d_q, "k": d_k, "v": d_v}
    if problem.table is not None:
        tuned = problem.tiles("window_table_gradient")
        groups = cdiv(b * windows, TOGETHER)
        d_pairs = logs.new_empty((groups, h, slots, slots))
        tiles = cdiv(slots, tuned.rows) * cdiv(slots, tuned.columns)
        launch(
            _table_gradient,
            (tiles * h * groups,),
            d_pairs,
            *from_out,
            b * windows,
            *rest,
            TOGETHER=TOGETHER,
            **problem.constants(tuned),
        )
        gradients["bias_table"] = sum_by_entry(d_pairs.sum(0), problem.size.axes)
    return gradients
