"""PaTH backward, from o, λ and do: the order of its kernels, and each chunk's own algebra.

Queries come in groups of a few chunks: they are carried to the first chunk, and come back with
their gradients (`carried_queries.py`), from which keys, values and reflections get theirs
(`key_gradient.py`). Memory grows with the tokens times the queries of a group, and not with
the tokens' square. Scores within chunks follow (`own_chunk.py`), and then every chunk goes back to
what it is made of (`chunk_gradient.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from precondattn_triton.path import carried_queries as path_carry
from precondattn_triton.path import key_gradient as path_key_gradient
from precondattn_triton.path import own_chunk as path_own
from precondattn_triton.path.chunk_gradient import OfChunks, through_chunks
from precondattn_triton.path.chunks import Chunks
from precondattn_triton.precision import padded_width, product_precision
from precondattn_triton.softmax.score_tiles import row_products
from precondattn_triton.tiles import Masks, configured

GROUP = 4
"""Chunks of queries that are carried together; X and Y are each so many times the queries' size."""

GROUP_TOKENS = 8192
"""Queries of all heads that are carried together at least: fewer leave processors without work."""

REFLECTION_ELEMENTS = 16384
"""Of F that one program adds up."""


class Inputs(NamedTuple):
    """Of one dtype, but for β."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor


class Gradients(NamedTuple):
    """Those of k, v and w padded to whole chunks and to tiles' widths (b n, T, …), float32."""

    q: Tensor
    """(b, t, h, d)"""
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    """(b n, T)"""


def path_backward(
    x: Inputs,
    chunks: Chunks,
    masks: Masks,
    full: Tensor,
    log_total: Tensor,
    d_out: Tensor,
    *,
    scale: float,
    window: int | None,
) -> Gradients:
    """From o in float32 and λ as forward found them, and do in the dtype of the values."""
    q, k, v = x[:3]
    b, t, h, d = q.shape
    s, n, e = v.shape[1:]
    size, count, tokens = chunks.size, chunks.count, chunks.size * chunks.count
    d_sum = row_products(d_out, full, log_total, masks.q_valid)
    w, keys, u, zr, _ = chunks
    width, widths = w.shape[2], {"PADDED_D": w.shape[2], "PADDED_E": padded_width(e)}
    own_y = w.new_empty((b, h, t, width), dtype=torch.float32)
    d_keys = w.new_zeros(w.shape, dtype=torch.float32)
    d_v = w.new_zeros((b * n, tokens, widths["PADDED_E"]), dtype=torch.float32)
    d_whole = d_keys.new_zeros((b * n * count, width, width))
    seen = {"HAS_WINDOW": window is not None, "D": d, "E": e, **widths}
    common = {"CHUNK": size, "PRECISION": product_precision(v.dtype)}
    sizes = scale, window or 0

    for start, end in _groups(t, s, size, b * h):
        rows, last = end - start, triton.cdiv(end + s - t, size)
        carried = w.new_empty((b, h, last, rows, width))
        returned = torch.empty_like(carried)
        group = start, end, rows, t, s, h, n
        tuned = configured("path_carry", q, v)
        path_carry.carry[(triton.cdiv(rows, tuned.rows) * b * h,)](
            q, w, u, carried, masks.q_valid, *group, tokens, last, *q.stride(),
            D=d, PADDED_D=width, ROWS=tuned.rows, **common,
            num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip
        tuned = configured("path_query_gradient", q, v)
        path_carry.come_back[(triton.cdiv(rows, tuned.rows) * b * h,)](
            carried, v, w, keys, u, d_out, log_total, d_sum, returned, own_y,
            *masks, *sizes, *group, tokens, last, *v.stride(), *d_out.stride(),
            HAS_WINDOW=window is not None, E=e, **widths, ROWS=tuned.rows, **common,
            num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip
        tuned = configured("path_key_gradient", q, v)
        tile = min(tuned.rows, size)
        path_key_gradient.past[(last * size // tile * b * n,)](
            carried, v, keys, d_out, log_total, d_sum, d_keys, d_v,
            *masks, *sizes, *group, tokens, last, *v.stride(), *d_out.stride(),
            **seen, ROWS=tile, COLUMNS=tuned.columns, **common,
            num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip
        tuned = configured("path_reflections", q, q)
        part = min(width, REFLECTION_ELEMENTS // width)
        path_key_gradient.reflections[(last * width // part * b * n,)](
            carried, returned, d_whole, *group, count, last,
            PADDED_D=width, WIDTH=part, COLUMNS=tuned.columns, **common,
            num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip

    d_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    a, d_s, own_b, d_own_b = (w.new_empty((b, h, t, size)) for _ in range(4))
    tuned = configured("path_own_scores", q, v)
    tile = min(tuned.rows, size)
    path_own.scores[(count * size // tile * b * h,)](
        q, k, v, w, u, zr, d_out, log_total, d_sum, own_y, d_q, a, d_s, own_b, d_own_b,
        *masks, *sizes, t, s, h, n, tokens,
        *q.stride(), *k.stride(), *v.stride(), *d_out.stride(),
        **seen, CHANNELS=tuned.columns, ROWS=tile, **common,
        num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
    d_k, d_w, d_u = (torch.empty_like(d_keys) for _ in range(3))
    d_zr = d_keys.new_empty(zr.shape)
    tuned = configured("path_gather", q, v)
    for left, right, found, sign in (
        (a, d_out, d_v, 1.0),
        (d_s, q, d_k, 1.0),
        (d_own_b, q, d_w, 1.0),
        (own_b, own_y.transpose(1, 2), d_u, -1.0),
        (own_b, d_s.transpose(1, 2), d_zr, -1.0),
    ):
        part = min(found.shape[2], tuned.columns)
        path_own.gather[(count * found.shape[2] // part * b * n,)](
            left, right, found, masks.q_valid, sign, t, s, h, n, tokens, *right.stride(),
            IS_SUM=found is d_v, WIDTH=right.shape[3], PADDED=found.shape[2], PART=part,
            ROWS=min(tuned.rows, size), **common,
            num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip
    left = OfChunks(d_k, d_w, d_u, d_zr, d_keys, d_whole)
    d_k, d_w, d_beta = through_chunks(k, x.beta, chunks, masks, left)
    return Gradients(d_q, d_k, d_v, d_w, d_beta)


def _groups(t: int, s: int, size: int, heads: int) -> list[tuple[int, int]]:
    """Queries that are carried together: they end where a chunk does, or with the call."""
    past, found, start = s - t, [], 0
    group = size * max(GROUP, triton.cdiv(GROUP_TOKENS, heads * size))
    while start < t:
        end = min((start + past) // size * size + group - past, t)
        found.append((start, end))
        start = end
    return found
