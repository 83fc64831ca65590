"""Many new tokens after a cache: LUCID's solve, of which the first rows of y are known.

    (I + diag(β) stril(Φ_new,new)) y_new = diag(β) (v_new − Φ_new,past y_past)

Cached tokens are the first columns of the matrix. They are padded to whole super-blocks, whose
padding is invalid; the new tokens begin at the next super-block. Then `update` sums the products
with the cached y as with any y solved before, and the cache's keys and y are read once for each
group of super-blocks of new tokens. In 16 bits, y of each cached super-block is divided by a power
of two for each channel, as `substitute` does.

Workspace: k̂ and y of all tokens as operands, and a copy of the keys, in one array.

Attention then reads y of all tokens. PyTorch's attention computes it for QUERIES new tokens at a
time, with the query heads of a key/value head as further rows: only a mask of these is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from precondattn.cache import Append, Updates
from precondattn.frame import Frame
from precondattn.spec.lucid import LucidSolve
from precondattn_triton.lucid.matrix import LucidMatrix
from precondattn_triton.lucid.plan import plan_of
from precondattn_triton.lucid.substitution import LARGEST, RANGE
from precondattn_triton.tiles import KernelMasks

QUERIES = 512
"""New tokens in one call of PyTorch's attention."""


class KnownTokens(NamedTuple):
    """The tokens of a cache that are the first columns of the matrix."""

    k: Tensor
    """(b, c, n, d)"""
    solved: Tensor
    """y (b, c, n, e)"""
    valid: Tensor | None
    """(b, c), boolean"""


class ExtendedMatrix(LucidMatrix):
    """The matrix of cached and new tokens, with y of the cached ones."""

    def __init__(
        self,
        leaf: LucidSolve,
        past: KnownTokens,
        x: Mapping[str, Tensor],
        new_valid: Tensor | None,
    ) -> None:
        """`new_valid` (b, t) are the valid ones of the new tokens `x`."""
        k, count = x["k"], past.k.shape[1]
        self.past, self.new = past, x
        plan = plan_of(leaf, k[:, :1].expand(-1, count + k.shape[1], -1, -1), x["v"])
        self.cached = -(-count // plan.super_block) * plan.super_block
        new_tokens = -(-k.shape[1] // plan.unit) * plan.unit
        self.plan = plan._replace(s=self.cached + k.shape[1], tokens=self.cached + new_tokens)
        self.leaf, self.backward, self.borders = leaf, False, None
        self.valid = self._validity(new_valid)
        self.masks = KernelMasks(None, self.valid.to(torch.uint8), None)
        beta = {name: self.after_known(x[name]) for name in x if name == "lucid_beta"}
        self.x = {**x, "k": self.after_known(k, past.k), **beta}
        self.prepared = self._prepare()

    def after_known(self, new: Tensor, old: Tensor | None = None) -> Tensor:
        """An array (b, s, n, …) of known and new tokens; without `old`, those are 0."""
        shape = new.shape[0], self.plan.s, *new.shape[2:]
        array = new.new_zeros(shape) if old is None else new.new_empty(shape)
        if old is not None:
            array[:, : old.shape[1]] = old
        array[:, self.cached :] = new
        return array

    def _validity(self, new_valid: Tensor | None) -> Tensor:
        """Which tokens are valid (b, s)."""
        plan, count, valid = self.plan, self.past.k.shape[1], self.past.valid
        all_valid = torch.ones((plan.b, plan.s), dtype=torch.bool, device=self.past.k.device)
        all_valid[:, count : self.cached] = False
        if valid is not None:
            all_valid[:, :count] = valid
        if new_valid is not None:
            all_valid[:, self.cached :] = new_valid
        return all_valid

    def _operands(self) -> tuple[Tensor, Tensor, Tensor]:
        solved, sizes, ratios = super()._operands()
        plan, past = self.plan, self.past.solved
        b, count, n, e = past.shape
        if self.cached == 0:
            return solved, sizes, ratios
        is_valid = self.valid[:, :count, None, None]
        by_head = solved.view(b, n, plan.tokens, plan.step)[:, :, : self.cached]
        y = past.new_zeros(by_head.shape)
        y[:, :, :count, :e] = torch.where(is_valid, past, 0.0).transpose(1, 2)
        if not plan.half:
            by_head.copy_(y)
            return solved, sizes, ratios
        y = y.view(plan.heads, -1, plan.super_block, plan.step)
        largest = y.abs().amax(2).float().clamp(1e-30, 1e38)
        exponents = largest.log2().ceil() - LARGEST.value
        exponents = torch.maximum(exponents, exponents.cummax(1).values - RANGE.value)
        blocks = exponents.shape[1]
        sizes[:, :blocks] = exponents.exp2()
        ratios[:, :blocks] = -exponents.diff(dim=1, prepend=exponents[:, :1])
        ratios[:, :blocks].exp2_()
        scaled = y.float() * torch.exp2(-exponents)[:, :, None]
        by_head.copy_(scaled.view(by_head.shape))
        return solved, sizes, ratios

    def new_rows(self, right: Tensor) -> tuple[Tensor, Tensor | None]:
        """y (b, t, n, e) of the new tokens for the right side of theirs, and rms(k) (b, t, n)."""
        plan, v = self.plan, self.new["v"]
        y = torch.empty_like(v, memory_format=torch.contiguous_format)
        self.solve(right, y, torch.empty_like(y) if self.leaf.beta else None)
        if self.leaf.normalize != "keys":
            return y, None
        reciprocal = self.prepared.reciprocal.view(plan.b, plan.n, plan.tokens)
        return y, 1.0 / reciprocal[:, :, self.cached : plan.s].transpose(1, 2)


def extended_matrix(
    leaf: LucidSolve, past: Mapping[str, Tensor], x: Mapping[str, Tensor], frame: Frame
) -> ExtendedMatrix:
    """The matrix with all tokens of a cache; `past` is by slot."""
    keys, solved = past["key"], past["solved"]
    capacity = keys.shape[1]
    if frame.held is not None:
        cached = KnownTokens(keys[:, : frame.held], solved[:, : frame.held], None)
        return ExtendedMatrix(leaf, cached, x, None)
    count = capacity if frame.longest is None else min(frame.longest, capacity)
    assert frame.k_valid is not None  # An extension always has the validity of slots.
    cached = KnownTokens(keys[:, :count], solved[:, :count], frame.k_valid[:, :count])
    return ExtendedMatrix(leaf, cached, x, frame.k_valid[:, capacity:])


def extend(
    leaf: LucidSolve, past: Mapping[str, Tensor], x: Mapping[str, Tensor], frame: Frame
) -> tuple[Tensor, Updates]:
    """y of the new tokens (b, t, n, e), and the updates of the buffers; `past` is by slot."""
    y, rms = extended_matrix(leaf, past, x, frame).new_rows(x["v"])
    updates: Updates = {"key": Append(x["k"]), "solved": Append(y)}
    return y, updates if rms is None else {**updates, "rms": Append(rms)}


def extend_and_attend(
    leaf: LucidSolve,
    scale: float,
    past: Mapping[str, Tensor],
    x: Mapping[str, Tensor],
    frame: Frame,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output (b, t, h, e) of softmax attention to y, y, and rms(k) if it is cached."""
    matrix = extended_matrix(leaf, past, x, frame)
    y, rms = matrix.new_rows(x["v"])
    count, cached, t = matrix.past.k.shape[1], matrix.cached, y.shape[1]
    valid = torch.cat((matrix.valid[:, :count], matrix.valid[:, cached:]), 1)
    keys = torch.cat((matrix.past.k, x["k"]), 1)
    values = torch.cat((matrix.past.solved, y), 1)
    if frame.held is None:
        # Masked slots may contain NaN.
        keys, values = (torch.where(valid[..., None, None], a, 0.0) for a in (keys, values))
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    out = y.new_empty((*x["q"].shape[:3], y.shape[3]))
    for first in range(0, t, QUERIES):
        rows = slice(first, min(first + QUERIES, t))
        seen = count + rows.stop
        out[:, rows] = _attention(
            x["q"][:, rows], keys[:, :, :seen], values[:, :, :seen], valid[:, :seen], scale
        )
    if frame.q_valid is not None:
        out = torch.where(frame.q_valid[..., None, None], out, 0.0)
    return out, y, rms


def _attention(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, scale: float) -> Tensor:
    """Attention of the last queries (b, t, h, d) to k (b, n, s, d) and v, of which some are valid.

    A query that sees no key has output 0.
    """
    (b, t, h, d), (n, s) = q.shape, k.shape[1:3]
    group = h // n
    position = torch.arange(s, device=q.device)
    visible = (position <= position[s - t :, None]) & valid[:, None]
    mask = visible.repeat(1, group, 1)[:, None]
    rows = q.view(b, t, n, group, d).permute(0, 2, 3, 1, 4).reshape(b, n, group * t, d)
    out = functional.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
    out = torch.where(mask.any(-1, keepdim=True), out, 0.0)
    return out.view(b, n, group, t, -1).permute(0, 3, 1, 2, 4).reshape(b, t, h, -1)
