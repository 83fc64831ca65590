"""Attention within windows, forward: o = softmax(S) v over the slots of a window (`slots.py`).

Grid: one program per tile of ROWS slots, window, head and sequence. It loops over its window's
tiles of COLUMNS keys, as in flash attention (`softmax/score_tiles.py`); a window of at most 64
tokens may be one tile. Queries, keys and values are read from the user's arrays, without copies in
window order. W² (d + e) products per window and head, where W is padded to whole tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from precondattn.kernel_backend.limits import padded_width
from precondattn.kernel_backend.windows import WindowGrid, WindowSize
from precondattn_triton.configurations import Configuration
from precondattn_triton.launching import cdiv, launch
from precondattn_triton.precision import product_precision
from precondattn_triton.softmax.differential_forward import triton_dtype
from precondattn_triton.softmax.score_tiles import mean_and_log, with_tile
from precondattn_triton.tiles import (
    LOG2_E,
    KernelMasks,
    configured,
    factor_dtype,
    load_tile,
    store_tile,
)
from precondattn_triton.windowed.slots import (
    and_valid,
    tokens_of,
    window_of_program,
    with_bias,
)


class WindowedArrays(NamedTuple):
    """The arrays and sizes that all kernels of a call read; one dtype, any strides."""

    q: torch.Tensor
    """(b, t, h, d)"""
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor | None
    """(entries, h)"""
    masks: KernelMasks
    scale: float
    grid: WindowGrid
    size: WindowSize

    def arguments(self) -> tuple[object, ...]:
        """The arguments that follow a kernel's own arrays."""
        _, t, h, _ = self.q.shape
        s, n = self.k.shape[1:3]
        table = (0, 0) if self.table is None else self.table.stride()
        strides = (*self.q.stride(), *self.k.stride(), *self.v.stride(), *table)
        valid = self.masks.q_valid, self.masks.k_valid
        return (
            self.q,
            self.k,
            self.v,
            self.table,
            *valid,
            self.scale,
            t,
            s,
            h,
            n,
            *self.grid,
            *strides,
        )

    def tiles(self, kernel: str) -> Configuration:
        """A kernel's tiles, which are not larger than a window."""
        tuned = configured(kernel, self.q, self.v)
        most = padded_width(self.size.slots)
        rows, columns = min(tuned.rows, most), min(tuned.columns, most)
        return tuned._replace(rows=rows, columns=columns)

    def constants(self, tuned: Configuration) -> dict[str, object]:
        d, e, dtype = self.q.shape[3], self.v.shape[3], self.v.dtype
        return {
            "D": d, "E": e, "PADDED_D": padded_width(d), "PADDED_E": padded_width(e),
            "W_ROWS": self.size.rows, "W_COLUMNS": self.size.columns,
            "ROWS": tuned.rows, "COLUMNS": tuned.columns,
            "PRECISION": product_precision(dtype), "FACTOR": triton_dtype(factor_dtype(dtype)),
            "num_warps": tuned.warps, "num_stages": tuned.stages,
        }  # fmt: skip


@triton.jit
def _forward(
    out, full, logs,
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
    q_tile = load_tile(
        q + batch * q_batch + head * q_head, query, is_row, q_token, q_channel, D, PADDED_D
    )
    k += batch * k_batch + kv * k_head
    v += batch * v_batch + kv * v_head

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, PADDED_E), tl.float32)
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
        largest, total, acc = with_tile(largest, total, acc, scores, values, PRECISION)
    o, row_logs = mean_and_log(largest, total, acc, is_row)
    tl.store(logs + (batch * h + head) * t + query, row_logs, mask=is_query)
    at = (batch * t * h + head) * E
    store_tile(out + at, query, is_query, h * E, o, E)
    if full is not None:
        store_tile(full + at, query, is_query, h * E, o, E)


def window_forward(problem: WindowedArrays) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, the output in float32 (the same array if it is float32), and λ (b, h, t)."""
    b, t, h, _ = problem.q.shape
    out = problem.v.new_empty((b, t, h, problem.v.shape[3]))
    is_half = problem.v.dtype != torch.float32
    full = torch.empty_like(out, dtype=torch.float32) if is_half else None
    logs = torch.empty((b, h, t), dtype=torch.float32, device=out.device)
    tuned = problem.tiles("window_forward")
    tiles = cdiv(problem.size.slots, tuned.rows)
    launch(
        _forward,
        (tiles * problem.grid.windows * b * h,),
        out,
        full,
        logs,
        *problem.arguments(),
        **problem.constants(tuned),
    )
    return out, out if full is None else full, logs
