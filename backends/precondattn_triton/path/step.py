"""A step of PaTH by one token: from the cache's buffers to launches of `decode.py`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from precondattn.cache import Append, Replace, Rewrite, Updates
from precondattn.frame import Frame
from precondattn.kernel_backend.limits import padded_width
from precondattn.spec.path import Path
from precondattn_triton.configurations import configuration
from precondattn_triton.decoding import lengths_of, splits_of, step_masks
from precondattn_triton.launching import cdiv, launch
from precondattn_triton.path import decode as path_decode
from precondattn_triton.precision import is_half, product_precision
from precondattn_triton.tiles import LOG2_E, heads

FLUSH_ROWS = 32
"""Keys that one program of `flush_keys` rewrites."""

LARGEST_TILE = 8192
"""Elements in a tile of queries that fits every multiprocessor."""


def refuses_step(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The reason why there is no step by one token for these shapes, or None."""
    h, d = shapes["q"][2:]
    n, e = shapes["v"][2:]
    rows, width = padded_width(h // n), padded_width(max(d, e))
    if width > 256 or rows > 64 or rows * width > LARGEST_TILE:
        return (
            f"its step of PaTH by one token supports d, e <= 256, and as many query heads per "
            f"key/value head as fit a tile; found d={d}, e={e} and {h // n}"
        )
    return None


def path_step(
    leaf: Path, past: Mapping[str, Tensor], x: Mapping[str, Tensor], frame: Frame
) -> tuple[Tensor, Updates]:
    """The output (b, 1, h, e), and the updates by slot."""
    q, k, v, w, beta = (x[name] for name in ("q", "k", "v", "w", "beta"))
    keys, values = past["key"], past["value"]
    (b, _, h, d), (n, e) = q.shape, v.shape[2:]
    flush = leaf.flush
    # If `flush` is 1, no reflection is ever pending, and these two arrays are not read.
    pending_w, pending_beta = past.get("pending_w", w), past.get("pending_beta", beta)
    masks = step_masks(frame, b, keys.shape[1])
    count, past_valid, new_valid, is_token = masks
    past_b, new_b, token_b = masks.strides
    lengths = lengths_of(frame, b)
    rows, key_width, width = padded_width(h // n), padded_width(d), padded_width(e)
    tuned = configuration("path_decode", max(key_width, width), is_half(q.dtype), q)
    splits, per_split = splits_of(q, count, b * n, tuned.columns)
    carried = q.new_empty((b * n, rows, key_width), dtype=torch.float32)
    totals = carried.new_empty((b * n, splits + 1, rows, width))
    maxima, sums = (carried.new_empty((b * n, splits + 1, rows)) for _ in range(2))
    parts = splits + 1
    sizes = path_decode.PathStepSizes(n, h // n, d, e, leaf.scale_for(d) * LOG2_E.value, flush)
    of_cache = heads(keys), heads(values)
    reflections = [
        heads(array) for array in (w, beta[..., None], pending_w, pending_beta[..., None])
    ]
    fixed = {"ROWS": rows, "KEY_WIDTH": key_width, "WIDTH": width}
    launch(
        path_decode.recent, (b * n,),
        heads(q), heads(k), heads(v), *reflections, *of_cache, lengths, past_valid, new_valid,
        carried, totals, maxima, sums, sizes, parts, leaf.window, past_b, new_b, **fixed,
    )  # fmt: skip
    launch(
        path_decode.flushed, (splits, b * n),
        carried, *of_cache, lengths, past_valid, totals, maxima, sums,
        count, sizes, parts, per_split, leaf.window, past_b,
        **fixed, TOKENS=tuned.columns, PRECISION=product_precision(q.dtype),
        num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
    out = torch.empty((b, 1, h, e), dtype=v.dtype, device=v.device)
    launch(
        path_decode.merge, (b * n,),
        totals, maxima, sums, is_token, out, parts, sizes, token_b,
        ROWS=rows, WIDTH=width,
    )  # fmt: skip

    new = k.to(keys.dtype)
    updates: Updates = {"value": Append(v), "key": Append(new)}
    # If lengths are on the device, the host does not know whether a sequence is flushed now.
    if frame.held is None or (frame.held + 1) % flush == 0:
        flushed = torch.empty_like(keys)
        launch(
            path_decode.flush_keys, (cdiv(keys.shape[1], FLUSH_ROWS), b * n),
            heads(keys), *reflections, lengths, is_token, heads(flushed),
            keys.shape[1], sizes, token_b, TOKENS=FLUSH_ROWS, KEY_WIDTH=key_width,
        )  # fmt: skip
        updates["key"] = Rewrite(flushed, new)
    if flush > 1:
        updates |= _pending(flush, past, w, beta, lengths, is_token)
    return out, updates


def _pending(
    flush: int,
    past: Mapping[str, Tensor],
    w: Tensor,
    beta: Tensor,
    lengths: Tensor,
    is_token: Tensor | None,
) -> Updates:
    """The pending reflections with the new one; none after a flush."""
    is_counted = torch.ones_like(lengths) if is_token is None else is_token[:, 0].to(lengths.dtype)
    slot = torch.arange(flush, device=w.device)[None, :]
    is_new = (slot == (lengths % flush)[:, None]) & (is_counted > 0)[:, None]
    is_kept = (slot < ((lengths + is_counted) % flush)[:, None])[:, :, None]
    old_w, old_beta = past["pending_w"], past["pending_beta"]
    all_beta = torch.where(is_new[:, :, None], beta.to(old_beta.dtype), old_beta)
    all_w = torch.where(is_new[:, :, None, None], w.to(old_w.dtype), old_w)
    return {
        "pending_w": Replace(all_w.where(is_kept[..., None], 0)),
        "pending_beta": Replace(all_beta.where(is_kept, 0)),
    }
