"""PaTH backward, from o, λ and do: the launches of its kernels in order. Scores are recomputed.

Queries are processed in groups of a few chunks: they are carried to the first chunk, and their
gradients are carried back (`carried_queries.py`). From both, the gradients of keys, values and
reflections are computed (`key_gradient.py`). Memory grows with the number of tokens times the
queries of a group, not with the square of the number of tokens. Then follow the scores within
chunks (`within_chunk.py`) and the gradients of the chunks' inputs (`chunk_gradient.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from precondattn.kernel_backend.limits import padded_width
from precondattn_triton.path import carried_queries as path_carry
from precondattn_triton.path import key_gradient as path_key_gradient
from precondattn_triton.path import within_chunk as path_within_chunk
from precondattn_triton.path.chunk_gradient import ChunkGradients, through_chunks
from precondattn_triton.path.chunks import PathChunks
from precondattn_triton.precision import product_precision, splits_weights
from precondattn_triton.softmax.score_tiles import row_products
from precondattn_triton.tiles import KernelMasks, configured

GROUP = 4
"""The least number of chunks of queries in a group. Groups determine the memory of X and Y."""

GROUP_TOKENS = 8192
"""The least number of queries in a group, over all heads: fewer leave multiprocessors idle."""

REFLECTION_ELEMENTS = 16384
"""Elements of F that a program computes."""


class PathInputs(NamedTuple):
    """The inputs of a call; all but β have the same dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor


class PathGradients(NamedTuple):
    """Gradients of the inputs, those of k, v and w as float32 (b n, T, …).

    T is padded to whole chunks, and widths are padded to tile widths.
    """

    q: Tensor
    """(b, t, h, d)"""
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    """(b n, T)"""


def path_backward(
    x: PathInputs,
    chunks: PathChunks,
    masks: KernelMasks,
    full: Tensor,
    log_total: Tensor,
    d_out: Tensor,
    *,
    scale: float,
    window: int | None,
) -> PathGradients:
    """All gradients, from o (float32) and λ of the forward pass, and do in the dtype of v."""
    q, k, v = x[:3]
    b, t, h, d = q.shape
    s, n, e = v.shape[1:]
    size, count, tokens = chunks.size, chunks.number, chunks.size * chunks.number
    d_sum = row_products(d_out, full, log_total, masks.q_valid)
    w, keys, u, zr, _ = chunks
    width, widths = w.shape[2], {"PADDED_D": w.shape[2], "PADDED_E": padded_width(e)}
    chunk_y = w.new_empty((b, h, t, width), dtype=torch.float32)
    d_keys = w.new_zeros(w.shape, dtype=torch.float32)
    d_v = w.new_zeros((b * n, tokens, widths["PADDED_E"]), dtype=torch.float32)
    d_whole = d_keys.new_zeros((b * n * count, width, width))
    widths_and_window = {"HAS_WINDOW": window is not None, "D": d, "E": e, **widths}
    common = {"CHUNK": size, "PRECISION": product_precision(v.dtype)}
    sizes = scale, window or 0

    for start, end in _groups(t, s, size, b * h):
        rows, last = end - start, triton.cdiv(end + s - t, size)
        carried = w.new_empty((b, h, last, rows, width))
        query_gradients = torch.empty_like(carried)
        group = start, end, rows, t, s, h, n
        tuned = configured("path_carry", q, v)
        path_carry.carry[(triton.cdiv(rows, tuned.rows) * b * h,)](
            q, w, u, carried, masks.q_valid, masks.segment, *group, tokens, last, *q.stride(),
            D=d, PADDED_D=width, ROWS=tuned.rows, **common,
            num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip
        tuned = configured("path_query_gradient", q, v)
        path_carry.query_gradient[(triton.cdiv(rows, tuned.rows) * b * h,)](
            carried, v, w, keys, u, d_out, log_total, d_sum, query_gradients, chunk_y,
            *masks, *sizes, *group, tokens, last, *v.stride(), *d_out.stride(),
            HAS_WINDOW=window is not None, E=e, **widths, ROWS=tuned.rows, **common,
            TWO_PARTS=splits_weights(v.dtype),
            num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip
        tuned = configured("path_key_gradient", q, v)
        tile = min(tuned.rows, size)
        path_key_gradient.key_value_gradient[(last * size // tile * b * n,)](
            carried, v, keys, d_out, log_total, d_sum, d_keys, d_v,
            *masks, *sizes, *group, tokens, last, *v.stride(), *d_out.stride(),
            **widths_and_window, ROWS=tile, COLUMNS=tuned.columns, **common,
            num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip
        tuned = configured("path_reflections", q, q)
        part = min(width, REFLECTION_ELEMENTS // width)
        path_key_gradient.reflections[(last * width // part * b * n,)](
            carried, query_gradients, d_whole, masks.segment, *group, count, last,
            PADDED_D=width, WIDTH=part, COLUMNS=tuned.columns, **common,
            num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip

    d_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    a, d_s, b_within, d_b_within = (w.new_empty((b, h, t, size)) for _ in range(4))
    tuned = configured("path_within_chunk", q, v)
    tile = min(tuned.rows, size)
    path_within_chunk.scores[(count * size // tile * b * h,)](
        q, k, v, w, u, zr, d_out, log_total, d_sum, chunk_y, d_q, a, d_s, b_within, d_b_within,
        *masks, *sizes, t, s, h, n, tokens,
        *q.stride(), *k.stride(), *v.stride(), *d_out.stride(),
        **widths_and_window, CHANNELS=tuned.columns, ROWS=tile, **common,
        TWO_PARTS=splits_weights(v.dtype),
        num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
    d_k, d_w, d_u = (torch.empty_like(d_keys) for _ in range(3))
    d_zr = d_keys.new_empty(zr.shape)
    tuned = configured("path_gather", q, v)
    for left, right, total, sign in (
        (a, d_out, d_v, 1.0),
        (d_s, q, d_k, 1.0),
        (d_b_within, q, d_w, 1.0),
        (b_within, chunk_y.transpose(1, 2), d_u, -1.0),
        (b_within, d_s.transpose(1, 2), d_zr, -1.0),
    ):
        part = min(total.shape[2], tuned.columns)
        path_within_chunk.gather[(count * total.shape[2] // part * b * n,)](
            left, right, total, masks.q_valid, sign, t, s, h, n, tokens, *right.stride(),
            IS_SUM=total is d_v, WIDTH=right.shape[3], PADDED=total.shape[2], PART=part,
            ROWS=min(tuned.rows, size), **common,
            num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip
    d_chunks = ChunkGradients(d_k, d_w, d_u, d_zr, d_keys, d_whole)
    d_k, d_w, d_beta = through_chunks(k, x.beta, chunks, masks, d_chunks)
    return PathGradients(d_q, d_k, d_v, d_w, d_beta)


def _groups(t: int, s: int, size: int, heads: int) -> list[tuple[int, int]]:
    """Ranges of queries, each of which ends at the end of a chunk or of the call."""
    past, groups, start = s - t, [], 0
    group = size * max(GROUP, triton.cdiv(GROUP_TOKENS, heads * size))
    while start < t:
        end = min((start + past) // size * size + group - past, t)
        groups.append((start, end))
        start = end
    return groups
