"""PaTH backward, from o, λ and do: the launches of its kernels in order. Scores are recomputed.

First all pairs of a query and a block before its own, then all pairs of a query and a chunk of its
block before its own: queries are carried to each block or chunk, and their gradients are carried
back (`carried_queries.py`). From both, the gradients of keys, values and reflections are computed
(`key_gradient.py`). Queries are processed in groups (`groups.py`), as many as a budget of memory
allows. Then follow the scores within chunks (`within_chunk.py`), and the gradients of the blocks'
and of the chunks' inputs (`blocks.py`, `chunk_gradient.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from precondattn.kernel_backend.limits import padded_width
from precondattn_triton.launching import cdiv, launch
from precondattn_triton.path import carried_queries as path_carry
from precondattn_triton.path import key_gradient as path_key_gradient
from precondattn_triton.path import within_chunk as path_within_chunk
from precondattn_triton.path.blocks import PathBlocks, block_gradients
from precondattn_triton.path.chunk_gradient import ChunkGradients, through_chunks
from precondattn_triton.path.chunks import PathChunks
from precondattn_triton.path.groups import Level, groups
from precondattn_triton.precision import product_precision, splits_weights
from precondattn_triton.softmax.score_tiles import row_products
from precondattn_triton.tiles import CallSizes, KernelMasks, configured, heads

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


class CarriedGradients(NamedTuple):
    """What all queries contribute to keys and reflections of chunks, or of blocks; float32."""

    keys: Tensor
    """dK (b n, keys, D)"""
    matrices: Tensor
    """F (b n, keys / L, D, D)"""


class _BackwardCall(NamedTuple):
    """What all launches of the backward pass read."""

    x: PathInputs
    chunks: PathChunks
    blocks: PathBlocks | None
    masks: KernelMasks
    log_total: Tensor
    d_sum: Tensor
    d_out: Tensor
    sizes: CallSizes
    window: int | None


def path_backward(
    x: PathInputs,
    chunks: PathChunks,
    blocks: PathBlocks | None,
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
    w, _, u, zr, _ = chunks
    width, value_width = w.shape[2], padded_width(e)
    sizes = CallSizes(scale, t, s, h, n)
    call = _BackwardCall(x, chunks, blocks, masks, log_total, d_sum, d_out, sizes, window)
    chunk_y = w.new_empty((b, h, t, width), dtype=torch.float32)
    d_v = w.new_zeros((b * n, tokens, value_width), dtype=torch.float32)
    d_blocks = None
    if blocks is not None:
        d_blocks = _carried(call, chunk_y, d_v, of_blocks=True)
    d_keys, d_whole = _carried(call, chunk_y, d_v, of_blocks=False)

    widths = {"D": d, "E": e, "PADDED_D": width, "PADDED_E": value_width}
    common = {"CHUNK": size, "PRECISION": product_precision(v.dtype)}
    d_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    a, d_s, b_within, d_b_within = (w.new_empty((b, h, t, size)) for _ in range(4))
    tuned = configured("path_within_chunk", q, v)
    tile = min(tuned.rows, size)
    launch(
        path_within_chunk.scores, (count * size // tile * b * h,),
        heads(q), heads(k), heads(v), w, u, zr, heads(d_out), log_total, d_sum, chunk_y,
        d_q, a, d_s, b_within, d_b_within, masks, window, sizes, tokens,
        **widths, CHANNELS=tuned.columns, ROWS=tile, **common,
        TWO_PARTS=splits_weights(v.dtype),
        num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
    d_k, d_w, d_u = (torch.empty_like(d_keys) for _ in range(3))
    d_zr = d_keys.new_empty(zr.shape)
    tuned = configured("path_gather", q, v)
    d_part, e_part = min(width, tuned.columns), min(value_width, tuned.columns)
    parts = max(width // d_part, value_width // e_part)
    launch(
        path_within_chunk.gather, (count * parts * b * n,),
        a, d_s, b_within, d_b_within, heads(q), heads(d_out), chunk_y, d_v, d_k, d_w, d_u, d_zr,
        masks.q_valid, sizes, tokens, **widths, D_PART=d_part, E_PART=e_part, PARTS=parts,
        ROWS=min(tuned.rows, size), **common,
        num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
    of_blocks = None
    if blocks is not None and d_blocks is not None:
        of_blocks = block_gradients(chunks, blocks, *d_blocks, v)
    d_chunks = ChunkGradients(d_k, d_w, d_u, d_zr, d_keys, d_whole)
    d_k, d_w, d_beta = through_chunks(k, x.beta, chunks, masks, d_chunks, of_blocks)
    return PathGradients(d_q, d_k, d_v, d_w, d_beta)


def _carried(
    call: _BackwardCall, chunk_y: Tensor, d_v: Tensor, *, of_blocks: bool
) -> CarriedGradients:
    """The gradients of keys and reflections of all blocks, or of all chunks.

    The gradients of queries are carried on in `chunk_y` (b, h, t, D), and `d_v` is added to.
    """
    q, _, v, _, _ = call.x
    b, t, h, d = q.shape
    s, n, e = v.shape[1:]
    w, keys, u, _, _ = call.chunks
    chunk, width, value_width = call.chunks.size, w.shape[2], padded_width(e)
    tokens = call.chunks.number * chunk
    blocks = call.blocks
    size = tokens if blocks is None else blocks.size
    past, corrections = s - t, None
    if of_blocks and blocks is not None:
        level = Level(size, blocks.number + 1)
        keys, corrections = blocks.keys, blocks.corrections
        past = max(past, size)  # The queries of the first block enter no other.
    else:
        level = Level(chunk, size // chunk)
    row_bytes = 2 * b * h * width * w.element_size()
    all_groups = groups(level, past, s, row_bytes)
    # Groups of whole parents have keys of their own; groups of one parent add to each other's.
    adds = len(all_groups) > 1 and all_groups[0].parent == all_groups[1].parent
    shape = keys.shape[0], keys.shape[1] // level.length, width, width
    is_written = all_groups[0].parent == 0 and not adds
    new = torch.empty if is_written else torch.zeros
    d_keys, d_matrices = (
        new(of, dtype=torch.float32, device=v.device) for of in (keys.shape, shape)
    )
    widths = {"E": e, "PADDED_D": width, "PADDED_E": value_width}
    precision = {"PRECISION": product_precision(v.dtype)}
    masks, window, sizes = call.masks, call.window, call.sizes
    of_outputs = heads(call.d_out), call.log_total, call.d_sum
    prefix = "path_block" if of_blocks else "path"
    matrices = blocks.number if blocks is not None else 1

    for group in all_groups:
        x_rows = w.new_empty((b, h, max(group.stored, 1), width))
        y_rows = torch.empty_like(x_rows)
        queries, keys_end = group.end - group.start, cdiv(group.end, level.length)
        keys_end = min(keys_end * level.length, keys.shape[1])
        tuned = configured("path_carry", q, v)
        launch(
            path_carry.carry, (cdiv(queries, tuned.rows) * b * h,),
            heads(q), w, u, corrections, x_rows, masks, window, group, sizes,
            size, tokens, matrices,
            D=d, PADDED_D=width, ROWS=tuned.rows, CHUNK=chunk, **precision,
            num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip
        tuned = configured(f"{prefix}_query_gradient", q, v)
        launch(
            path_carry.query_gradient, (cdiv(queries, tuned.rows) * b * h,),
            x_rows, heads(v), w, keys, u, corrections, *of_outputs, y_rows, chunk_y,
            masks, window, group, sizes, size, tokens, matrices,
            HAS_BLOCKS=blocks is not None, **widths, COLUMNS=tuned.columns, ROWS=tuned.rows,
            CHUNK=chunk, **precision, TWO_PARTS=splits_weights(v.dtype),
            num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip
        tuned = configured(f"{prefix}_key_gradient", q, v)
        rows, columns = (min(tile, level.length) for tile in tuned[:2])
        launch(
            path_key_gradient.key_value_gradient, ((keys_end - group.parent) // rows * b * n,),
            x_rows, heads(v), keys, *of_outputs, d_keys, d_v, masks, window, group, sizes,
            tokens, keys.shape[1], group.parent, keys_end,
            ADDS=adds, **widths, ROWS=rows, COLUMNS=columns, **precision,
            num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip
        tuned = configured("path_reflections", q, q)
        part, columns = min(width, REFLECTION_ELEMENTS // width), min(tuned.columns, level.length)
        first, last = group.parent // level.length, keys_end // level.length
        launch(
            path_key_gradient.reflections, ((last - first) * (width // part) * b * n,),
            x_rows, y_rows, d_matrices, masks, window, group, sizes, shape[1], first, last,
            PADDED_D=width, WIDTH=part, ADDS=adds, COLUMNS=columns, **precision,
            num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip
    return CarriedGradients(d_keys, d_matrices)
