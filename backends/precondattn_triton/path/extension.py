"""Many new tokens of PaTH after a cache: from the cache's buffers to launches.

Tokens before the last flush have their reflections in the cached keys. The others, which are
*pending*, and the new ones are a call of PaTH with fewer queries than keys (`forward.py`); its
queries then read the keys before (`cached_keys.py`). If a flush is passed, all keys are transported
(`transport.py`), those of the new tokens too.

If sequences differ in their lengths, the last `flush` − 1 slots of each are taken, and those before
its own last flush are invalid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from precondattn.cache import Append, Replace, Rewrite, Updates
from precondattn.frame import Frame
from precondattn.kernel_backend.limits import padded_width
from precondattn.spec.path import Path
from precondattn_triton.decoding import lengths_of, splits_of
from precondattn_triton.launching import cdiv, launch
from precondattn_triton.path import cached_keys as path_cached
from precondattn_triton.path import transport as path_transport
from precondattn_triton.path.blocks import WIDEST, block_size, first_blocks, path_blocks
from precondattn_triton.path.chunks import chunking, path_chunks
from precondattn_triton.path.forward import path_forward
from precondattn_triton.precision import product_precision, splits_weights
from precondattn_triton.softmax.channel_parts import refuses_widths
from precondattn_triton.softmax.score_tiles import ELEMENTS
from precondattn_triton.tiles import KernelMasks, bytes_of, configured, heads


def refuses_extension(dtype: str, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The reason why there is no step of several tokens for these shapes, or None."""
    d, e = shapes["k"][3], shapes["v"][3]
    if d > WIDEST:
        return f"its step of PaTH by several tokens supports d <= {WIDEST}; found d={d}"
    return refuses_widths("PaTH", dtype, d, e)


class RecentTokens(NamedTuple):
    """The `pending` last cached tokens, then the t new ones."""

    pending: int
    k: Tensor
    """(b, pending + t, n, d), float32, as are w and beta"""
    v: Tensor
    """(b, pending + t, n, e), in the dtype of the values"""
    w: Tensor
    beta: Tensor
    valid: Tensor | None
    """(b, pending + t), boolean"""
    lengths: Tensor
    """(b,): the cached tokens of each sequence"""


def path_extend(
    leaf: Path, past: Mapping[str, Tensor], x: Mapping[str, Tensor], frame: Frame
) -> tuple[Tensor, Updates]:
    """The output (b, t, h, e), and the updates by slot."""
    return extend_recent(leaf, past, x, frame, recent_tokens(leaf.flush, past, x, frame))


def extend_recent(
    leaf: Path,
    past: Mapping[str, Tensor],
    x: Mapping[str, Tensor],
    frame: Frame,
    recent: RecentTokens,
) -> tuple[Tensor, Updates]:
    """The result of `path_extend` from the tokens that are not flushed before it."""
    updates: Updates = {"value": Append(x["v"])}
    updates |= advanced(leaf.flush, past, frame, recent)
    return _read(leaf, past, x, frame, recent), updates


def recent_tokens(
    flush: int, past: Mapping[str, Tensor], x: Mapping[str, Tensor], frame: Frame
) -> RecentTokens:
    """The tokens of an extension that are not flushed before it."""
    keys, (b, t) = past["key"], x["k"].shape[:2]
    capacity = keys.shape[1]
    lengths = lengths_of(frame, b)
    pending = min(flush - 1, capacity) if frame.held is None else frame.held % flush
    valid = frame.valid_keys(t)
    new = [x[name].to(keys.dtype) for name in ("k", "w", "beta")]
    if pending == 0:
        k, w, beta = new
        return RecentTokens(0, k, x["v"], w, beta, valid, lengths)
    buffers = keys, past["value"]
    of_reflections = past["pending_w"], past["pending_beta"]
    if frame.held is not None:
        first = frame.held - pending
        old_k, old_v = (buffer[:, first : frame.held] for buffer in buffers)
        old_w, old_beta = (buffer[:, :pending] for buffer in of_reflections)
    else:
        slots = lengths[:, None] - pending + torch.arange(pending, device=keys.device)
        index = slots - (lengths - lengths % flush)[:, None]
        rows = torch.arange(b, device=keys.device)[:, None]
        slots, is_pending, index = slots.clamp_min(0), index >= 0, index.clamp_min(0)
        old_k, old_v = (buffer[rows, slots] for buffer in buffers)
        old_w, old_beta = (buffer[rows, index] for buffer in of_reflections)
        assert frame.k_valid is not None  # An extension always has the validity of slots.
        assert valid is not None
        is_pending = is_pending & frame.k_valid.expand(b, -1)[rows, slots]
        valid = torch.cat((is_pending, valid.expand(b, -1)), 1)
    k, w, beta = (torch.cat(pair, 1) for pair in zip((old_k, old_w, old_beta), new, strict=True))
    return RecentTokens(pending, k, torch.cat((old_v, x["v"]), 1), w, beta, valid, lengths)


def _read(
    leaf: Path,
    past: Mapping[str, Tensor],
    x: Mapping[str, Tensor],
    frame: Frame,
    recent: RecentTokens,
) -> Tensor:
    """The output (b, t, h, e) in the dtype of the values."""
    v, keys, values = recent.v, past["key"], past["value"]
    q, k, w = (array.to(v.dtype) for array in (x["q"], recent.k, recent.w))
    (b, t, h, d), (n, e) = q.shape, v.shape[2:]
    masks = KernelMasks(bytes_of(frame.q_valid, b), bytes_of(recent.valid, b), None)
    count = keys.shape[1] if frame.held is None else frame.held - recent.pending
    width, value_width = padded_width(d), padded_width(e)
    chunks = path_chunks(k, w, recent.beta, masks, with_inverse=False)
    blocks = path_blocks(chunks, k.shape[1], v, with_after=False)
    scale, window = leaf.scale_for(d), leaf.window
    results = path_forward(
        q, k, v, chunks, blocks, masks, scale=scale, window=window, is_step=count > 0
    )
    if count == 0:
        return results.out
    tuned = configured("path_forward", q, v)
    queries = h // n * t
    rows = min(tuned.rows, max(padded_width(queries), 16))
    parts, per_part = splits_of(q, count, b * n * cdiv(queries, rows), tuned.columns)
    outs = results.out.new_empty((b * n, parts, queries, value_width))
    logs = results.out.new_empty((b * n, parts, queries))
    valid = None
    if frame.held is None:
        assert frame.k_valid is not None
        valid = bytes_of(frame.k_valid[:, :count], b)
    launch(
        path_cached.read_cached, (cdiv(queries, rows) * b * n, parts),
        results.out, heads(keys), heads(values), recent.lengths, valid, outs, logs,
        count, n, queries, t, per_part, scale, window, leaf.flush,
        D=d, E=e, PADDED_D=width, PADDED_E=value_width,
        ROWS=rows, COLUMNS=tuned.columns,
        PRECISION=product_precision(v.dtype), TWO_PARTS=splits_weights(v.dtype),
        num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
    out = v.new_empty((b, t, h, e))
    rows = max(ELEMENTS // value_width, 16)
    launch(
        path_cached.merge_parts, (cdiv(t, rows) * b * h,),
        results.out, results.log_total, outs, logs, masks.q_valid, out, t, h, n, parts,
        E=e, PADDED_D=width, PADDED_E=value_width, ROWS=rows,
    )  # fmt: skip
    return out


def advanced(flush: int, past: Mapping[str, Tensor], frame: Frame, recent: RecentTokens) -> Updates:
    """The updates of keys and pending reflections."""
    pending = recent.pending
    t = recent.k.shape[1] - pending
    # How many of the recent tokens the new last flush has passed: of each sequence, or of all.
    if frame.held is not None:
        passed = (pending + t) // flush * flush
        beta = recent.beta.clone()
        beta[:, passed:] = 0
        left = slice(passed, pending + t)
        updates: Updates = {"key": Append(recent.k[:, pending:])}
        if passed > 0:
            updates = {"key": _transported(past["key"], recent, beta, frame.held, flush)}
        if flush > 1:
            for name, array in (("pending_w", recent.w), ("pending_beta", recent.beta)):
                state = torch.zeros_like(past[name])
                state[:, : pending + t - passed] = array[:, left]
                updates[name] = Replace(state)
        return updates
    counts = t if frame.q_valid is None else frame.q_valid.sum(1)
    after = recent.lengths + counts
    ends = pending + after - after % flush - recent.lengths
    token = torch.arange(pending + t, device=after.device)
    beta = torch.where((token < ends[:, None])[:, :, None], recent.beta, 0.0)
    updates = {"key": _transported(past["key"], recent, beta, past["key"].shape[1], flush)}
    if flush > 1:
        slot = torch.arange(flush, device=after.device)
        index = (ends[:, None] + slot).clamp_max(pending + t - 1)
        is_kept = slot < (after % flush)[:, None]
        rows = torch.arange(len(after), device=after.device)[:, None]
        w, beta = recent.w[rows, index], recent.beta[rows, index]
        updates["pending_w"] = Replace(w.where(is_kept[:, :, None, None], 0))
        updates["pending_beta"] = Replace(beta.where(is_kept[:, :, None], 0))
    return updates


def _transported(
    keys: Tensor, recent: RecentTokens, beta: Tensor, count: int, flush: int
) -> Rewrite:
    """The first `count` cached keys and the new ones, with the reflections of strength `beta`."""
    b, _, n, d = keys.shape
    tokens = recent.k.shape[1]
    t, width = tokens - recent.pending, padded_width(d)
    size = block_size(tokens, chunking(recent.k).rows)
    number = cdiv(tokens, size)
    masks = KernelMasks(None, bytes_of(recent.valid, b), None)
    chunks = path_chunks(recent.k, recent.w, beta, masks, with_inverse=False, tokens=number * size)
    blocks = first_blocks(chunks, size, number, recent.k, with_after=False)
    precision = product_precision(recent.k.dtype)
    products = blocks.corrections
    if number > 1:
        products = torch.empty_like(blocks.corrections)
        tuned = configured("path_blocks", recent.k, recent.k)
        part = min(width, tuned.columns)
        launch(
            path_transport.later_products, (width // part * b * n,),
            blocks.corrections, products, b * n, number,
            PADDED_D=width, WIDTH=part, PART=min(width, path_transport.PART), PRECISION=precision,
            num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip
    past, new = (keys.new_empty((b, rows, n, d)) for rows in (count, t))
    tuned = configured("path_carry", recent.k, recent.k)
    launch(
        path_transport.transport, ((cdiv(count, tuned.rows) + cdiv(tokens, tuned.rows)) * b * n,),
        heads(keys), blocks.keys, products, recent.lengths, past, new,
        count, n, number * size, t, recent.pending, flush, size, number,
        D=d, PADDED_D=width, ROWS=tuned.rows, PRECISION=precision,
        num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
    return Rewrite(past, new)
