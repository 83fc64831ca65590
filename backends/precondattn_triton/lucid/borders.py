"""LUCID's keys in PaTH's metric: any two of them meet at one border, and there by a plain product.

    Φ_ij = e^{s ⟨i, j⟩ − s d},    ⟨i, j⟩ = k̂_iᵀ H_i … H_{j+1} k̂_j,    H_t = I − β_t w_t w_tᵀ

Blocks of C 2^l tokens stand two by two in those of the next level, up to the whole sequence. Two
tokens of different chunks are in the two halves of one block of one level, and between them is the
border in its middle. With x_i the later token carried back to it as a query, and κ_j the earlier
one carried on to it as a key,

    ⟨i, j⟩ = x_i · κ_j.

On every level a token stands on one side of one border: what it brings there, z, is one row. So the
kernels of LUCID's dot product serve, with z in place of keys. From a level to the next, with P the
product of a block's reflections,

    x ← x P_first  in second halves,    κ ← κ P_secondᵀ  in first halves,    P ← P_second P_first,

2 d² products a token, for each of log₂ (T / C) levels. Chunks begin it, with the factors of
`path/chunks.py` at q = k = k̂,

    S = k̂ k̂ᵀ − B Z R,    B = tril(k̂ wᵀ),    x = k̂ − B U,    κ = K̃,    P = I − wᵀ U,

S being the scores within a chunk. Backward, levels are gone through from the last to the first,

    dP_first = xᵀ dx + P_secondᵀ dP,    dP_second = dκᵀ κ + dP P_firstᵀ,

and chunks last. In memory stand, for each token and level, z as an operand; C numbers of S; and
2 d² / C of P. What is C × d or d × d is multiplied by PyTorch, in stacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from precondattn_triton.lucid import border_gradient as lucid_border_gradient
from precondattn_triton.lucid import crossing as lucid_crossing
from precondattn_triton.lucid.plan import Plan
from precondattn_triton.path.chunk_gradient import OfChunks, through_chunks
from precondattn_triton.path.chunks import Chunks, path_chunks
from precondattn_triton.tiles import Masks


class Borders(NamedTuple):
    """Of one call's keys."""

    unit: Tensor
    """k̂ (b, s, n, d)"""
    path_beta: Tensor
    """β of the reflections (b, s, n)"""
    chunks: Chunks
    own: Tensor
    """S (m, T, C), float32"""
    keys: Tensor
    """z (levels, m, T, D)"""
    whole: list[Tensor]
    """P of every level's whole blocks (m, blocks, D, D), but for the last level, as z"""

    def level(self, half: int) -> int:
        """Of the borders between blocks of `half` tokens."""
        return (half // self.chunks.size).bit_length() - 1


def borders_of(
    plan: Plan, unit: Tensor, x: Mapping[str, Tensor], masks: Masks, *, with_inverse: bool
) -> Borders:
    """Of k̂ (m, T, D), 0 at tokens that count for nothing, and w and β (b, s, n, …)."""
    by_token = unit.view(plan.b, plan.n, plan.tokens, plan.key_width).transpose(1, 2)
    k = by_token[:, : plan.s, :, : plan.d]
    cut = plan.reflections._replace(rows=plan.path_chunk)
    chunks = path_chunks(
        k, x["w"].to(unit.dtype), x["beta"], masks,
        with_inverse=with_inverse, configuration=cut, tokens=plan.tokens,
    )  # fmt: skip
    w, u, zr = (_stack(a, chunks) for a in (chunks.w, chunks.u, chunks.zr))
    its = _stack(unit, chunks)
    b = (its @ w.mT).tril()
    own = torch.baddbmm(its @ its.mT, b, zr, alpha=-1).view(plan.heads, plan.tokens, chunks.size)
    rows = torch.stack((chunks.keys, torch.baddbmm(its, b, u, alpha=-1).view_as(chunks.keys)))
    whole = [_identity_minus(w.mT @ u).to(plan.dtype).unflatten(0, (plan.heads, -1))]
    levels = (triton.cdiv(plan.tokens, chunks.size) - 1).bit_length()
    keys = unit.new_empty((levels, *unit.shape))
    for level in range(levels):
        half, is_last = chunks.size << level, level == levels - 1
        lucid_crossing.cross[(plan.tokens // plan.reflections.rows, plan.heads)](
            rows, whole[level], keys[level], plan.tokens, half,
            0 if is_last else plan.tokens // half, **_crossing(plan),
        )  # fmt: skip
        if not is_last:
            first, second = _halves(whole[level])
            whole.append(second @ first)
    return Borders(k, x["beta"], chunks, own, keys, whole)


class Gradients(NamedTuple):
    """Of what borders are made of, float32."""

    unit: Tensor
    """dk̂ (m, T, D)"""
    w: Tensor
    """(m, T, D)"""
    path_beta: Tensor
    """(m, T)"""


def borders_gradient(
    plan: Plan, borders: Borders, unit: Tensor, masks: Masks, segments: Tensor | None,
    y: Tensor, d_v: Tensor,
) -> Gradients:  # fmt: skip
    """From y and dv (b, s, n, e), 0 at tokens that count for nothing; segments (b, T)."""
    d_rows = unit.new_zeros((2, *unit.shape), dtype=torch.float32)
    d_keys = torch.empty_like(d_rows[0])
    d_whole = None
    scores = {
        "HAS_SEGMENTS": segments is not None, "WIDTH": plan.chunk, "CHUNKS": plan.chunks,
        "PRECISION": plan.precision,
        "num_warps": plan.gradient.warps, "num_stages": plan.gradient.stages,
    }  # fmt: skip
    sizes = plan.s, plan.n, plan.tokens, plan.e
    factors = *plan.score_factors, plan.scale, *y.stride(), *d_v.stride()
    levels = len(borders.keys)
    for level in reversed(range(levels)):
        half, blocks = borders.chunks.size << level, 0
        rows, columns = (min(tile, half) for tile in plan.gradient[:2])
        lucid_border_gradient.at_border[(plan.tokens // rows, plan.heads)](
            borders.keys[level], segments, y, d_v, d_keys, *sizes, half, *factors,
            TILE=rows, COLUMNS=columns, KEY_WIDTH=plan.key_width, **scores,
        )  # fmt: skip
        if level < levels - 1:
            blocks = plan.tokens // half
            d_whole = _whole_gradient(borders, level, d_rows, d_whole)
        lucid_crossing.come_back[(plan.tokens // plan.reflections.rows, plan.heads)](
            d_rows, borders.whole[level], d_keys, plan.tokens, half, blocks, **_crossing(plan),
        )  # fmt: skip
    d_own = torch.empty_like(borders.own)
    rows, columns = (min(tile, borders.chunks.size) for tile in plan.gradient[:2])
    lucid_border_gradient.within[(plan.tokens // rows, plan.heads)](
        borders.own, segments, y, d_v, d_own, *sizes, *factors,
        TILE=rows, COLUMNS=columns, CHUNK=borders.chunks.size, **scores,
    )  # fmt: skip
    if d_whole is None:  # There was nothing to cross.
        d_whole = torch.zeros_like(borders.whole[0], dtype=torch.float32)
    return _from_chunks(borders, unit, masks, d_own, d_rows, d_whole.flatten(0, 1))


def _whole_gradient(borders: Borders, level: int, d_rows: Tensor, d_next: Tensor | None) -> Tensor:
    """dP of a level (m, blocks, D, D), from rows behind its borders and dP of the next level."""
    half = borders.chunks.size << level
    z, whole = borders.keys[level].float(), borders.whole[level].float()
    found = torch.zeros_like(whole)
    d_first, d_second = _halves(found)
    end = 2 * half * d_first.shape[1]
    z_first, z_second = _halves(z[:, :end].unflatten(1, (-1, half)))
    d_key, d_query = (
        halves[side]
        for side, halves in enumerate(_halves(d[:, :end].unflatten(1, (-1, half))) for d in d_rows)
    )
    d_first += z_second.mT @ d_query
    d_second += d_key.mT @ z_first
    if d_next is not None:
        first, second = _halves(whole)
        d_second += d_next @ first.mT
        d_first += second.mT @ d_next
    if z.shape[1] > end + half:  # A second block that is not whole.
        found[:, -1] = z[:, end + half :].mT @ d_rows[1, :, end + half :]
    return found


def _from_chunks(
    borders: Borders, unit: Tensor, masks: Masks, d_own: Tensor, d_rows: Tensor, d_whole: Tensor
) -> Gradients:
    """Through S, x, κ and P of every chunk."""
    chunks = borders.chunks
    w, u, zr, its, d_s, d_keys, d_x = (
        _stack(a, chunks) for a in (chunks.w, chunks.u, chunks.zr, unit, d_own, *d_rows)
    )
    b = (its @ w.mT).tril()
    d_b = -torch.baddbmm(d_x @ u.mT, d_s, zr.mT).tril()
    d_k = torch.baddbmm(d_x, d_s + d_s.mT, its).baddbmm(d_b, w)
    left = OfChunks(d_k, d_b.mT @ its, -b.mT @ d_x, -b.mT @ d_s, d_keys, d_whole)
    found = through_chunks(borders.unit, borders.path_beta, chunks, masks, left)
    return Gradients(*(d.reshape(*unit.shape[:2], *d.shape[2:]) for d in found))


def _crossing(plan: Plan) -> dict[str, Any]:
    cut = plan.reflections
    return {
        "ROWS": cut.rows, "WIDTH": plan.key_width, "PART": min(lucid_crossing.PART, plan.key_width),
        "PRECISION": plan.precision, "num_warps": cut.warps, "num_stages": cut.stages,
    }  # fmt: skip


def _stack(rows: Tensor, chunks: Chunks) -> Tensor:
    """(m chunks, C, …), float32, of rows (m, T, …)."""
    return rows.reshape(-1, chunks.size, rows.shape[2]).float()


def _halves(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second of every two that are there, of (m, blocks, …)."""
    pairs = blocks[:, : blocks.shape[1] // 2 * 2]
    return pairs[:, 0::2], pairs[:, 1::2]


def _identity_minus(a: Tensor) -> Tensor:
    return torch.eye(a.shape[-1], dtype=a.dtype, device=a.device) - a
