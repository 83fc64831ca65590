"""New tokens of LUCID in PaTH's metric after a cache: from the cache's buffers to launches.

Tokens since the last flush, which are pending, and the new ones are those of a matrix with borders
(`borders.py`), in which y of the pending ones is known (`extension.py`). All of these come after
the flush, up to which the other cached keys have been transported. So their sums are products too
(`flushed_sums.py`), which are subtracted from the right sides:

    (I + diag(β) stril(Φ_new,new)) y_new = diag(β) (v_new − P − Φ_new,pending y_pending)

The cache is read once for each tile of new tokens, and not copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from precondattn.cache import Append, Updates
from precondattn.frame import Frame
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.transported import Transported
from precondattn_triton.configurations import configuration
from precondattn_triton.decoding import splits_of
from precondattn_triton.launching import launch
from precondattn_triton.lucid import flushed_sums as lucid_flushed
from precondattn_triton.lucid.borders import borders_of
from precondattn_triton.lucid.extension import ExtendedMatrix, KnownTokens
from precondattn_triton.path.extension import RecentTokens, advanced, recent_tokens
from precondattn_triton.tiles import bytes_of


class SolvedTokens(NamedTuple):
    """The result of a step of the solve."""

    y: Tensor
    """(b, t, n, e)"""
    norms: Tensor | None
    """rms(k) of the new tokens (b, t, n), float32, if it is cached"""
    recent: RecentTokens
    """The tokens that are not flushed before the step, with y as their values"""


def solve_new_tokens(
    leaf: LucidSolve, past: Mapping[str, Tensor], x: Mapping[str, Tensor], frame: Frame
) -> SolvedTokens:
    """y of the new tokens; `past` is by slot."""
    flush = flush_of(leaf)
    recent = recent_tokens(flush, {**past, "value": past["solved"]}, x, frame)
    pending = recent.pending
    old = recent.valid if recent.valid is None else recent.valid[:, :pending]
    new = recent.valid if recent.valid is None else recent.valid[:, pending:]
    cached = KnownTokens(recent.k[:, :pending], recent.v[:, :pending], old)
    matrix = ExtendedMatrix(leaf, cached, x, new)
    reflections = {
        name: matrix.after_known(x[name], old_rows[:, :pending])
        for name, old_rows in (("w", recent.w), ("beta", recent.beta))
    }
    matrix.borders = borders_of(
        matrix.plan, matrix.prepared.keys, reflections, matrix.masks,
        with_inverse=False, to_start=True,
    )  # fmt: skip
    y, norms = matrix.new_rows(_right_sides(matrix, flush, past, frame, recent))
    return SolvedTokens(y, norms, recent)


def extend(
    leaf: LucidSolve, past: Mapping[str, Tensor], x: Mapping[str, Tensor], frame: Frame
) -> tuple[Tensor, Updates]:
    """y of the new tokens (b, t, n, e), and the updates of the buffers, by slot."""
    y, norms, recent = solve_new_tokens(leaf, past, x, frame)
    updates: Updates = {"solved": Append(y), **advanced(flush_of(leaf), past, frame, recent)}
    return y, updates if norms is None else {**updates, "rms": Append(norms)}


def flush_of(leaf: LucidSolve) -> int:
    """The number of tokens between two flushes of the cached keys."""
    assert isinstance(leaf.metric, Transported)
    return leaf.metric.flush


def _right_sides(
    matrix: ExtendedMatrix,
    flush: int,
    past: Mapping[str, Tensor],
    frame: Frame,
    recent: RecentTokens,
) -> Tensor:
    """v − P of the new tokens (b, t, n, e): v itself if no token is flushed, else float32."""
    plan, cached, v, borders = matrix.plan, matrix.cached, matrix.new["v"], matrix.borders
    keys, solved, norms = past["key"], past["solved"], past.get("rms")
    count = keys.shape[1] if frame.held is None else frame.held - recent.pending
    if count == 0:
        return v
    assert borders is not None
    valid = None
    if frame.held is None:
        assert frame.k_valid is not None  # An extension always has the validity of slots.
        valid = bytes_of(frame.k_valid[:, :count], plan.b)
    tuned = configuration("path_forward", max(plan.key_width, plan.chunk), plan.half, v)
    rows = min(tuned.rows, plan.unit)
    tiles = (plan.tokens - cached) // rows
    programs = tiles * plan.heads * plan.chunks
    parts, per_part = splits_of(v, count, programs, tuned.columns)
    sums = borders.rows.new_empty((parts, plan.heads, plan.tokens - cached, plan.step))
    launch(
        lucid_flushed.flushed_sums, (tiles, plan.heads, parts * plan.chunks),
        borders.rows[1], keys, norms, solved, recent.lengths, valid, sums,
        count, plan.n, plan.tokens, cached, flush, per_part, *plan.score_factors, plan.e,
        *keys.stride(), *((0, 0, 0) if norms is None else norms.stride()), *solved.stride(),
        D=plan.d, KEY_WIDTH=plan.key_width, WIDTH=plan.chunk, STEP=plan.step,
        ROWS=rows, COLUMNS=tuned.columns, HALF=plan.half, TWO_PARTS=v.dtype == torch.bfloat16,
        PRECISION=plan.precision, num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
    by_head = sums.sum(0).view(plan.b, plan.n, -1, plan.step)[:, :, : v.shape[1], : plan.e]
    return v.float() - by_head.transpose(1, 2)
