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

import torch
from torch import Tensor
from torch.nn import functional

from precondattn.cache import Append, Updates
from precondattn.frame import Frame
from precondattn.spec.lucid import LucidSolve
from precondattn_triton.lucid.plan import plan_of
from precondattn_triton.lucid.solve import LucidMatrix
from precondattn_triton.lucid.substitution import LARGEST, RANGE
from precondattn_triton.tiles import KernelMasks

QUERIES = 512
"""New tokens in one call of PyTorch's attention."""


class ExtendedMatrix(LucidMatrix):
    """The matrix of cached and new tokens, with y of the cached ones."""

    def __init__(
        self, leaf: LucidSolve, past: Mapping[str, Tensor], x: Mapping[str, Tensor], frame: Frame
    ) -> None:
        keys, k = past["key"], x["k"]
        t, capacity = k.shape[1], keys.shape[1]
        count = capacity if frame.held is None else frame.held
        if frame.held is None and frame.longest is not None:
            count = min(frame.longest, capacity)
        plan = plan_of(leaf, k[:, :1].expand(-1, count + t, -1, -1), x["v"])
        self.known = -(-count // plan.super_block) * plan.super_block
        self.plan = plan._replace(
            s=self.known + t, tokens=self.known + -(-t // plan.unit) * plan.unit
        )
        all_keys = k.new_empty((k.shape[0], self.plan.s, *k.shape[2:]))
        all_keys[:, :count] = keys[:, :count]
        all_keys[:, self.known :] = k
        self.leaf, self.backward, self.borders = leaf, False, None
        beta = {
            name: functional.pad(x[name], (0, 0, self.known, 0))
            for name in x
            if name == "lucid_beta"
        }
        self.x = {**x, "k": all_keys, **beta}
        self.valid = self._validity(frame, count, capacity)
        self.masks = KernelMasks(None, self.valid.to(torch.uint8), None)
        self.past_solved = past["solved"][:, :count]
        self.prepared = self._prepare()

    def _validity(self, frame: Frame, count: int, capacity: int) -> Tensor:
        """Which tokens are valid (b, s)."""
        b, known, s = self.plan.b, self.known, self.plan.s
        valid = torch.ones((b, s), dtype=torch.bool, device=self.x["k"].device)
        valid[:, count:known] = False
        if frame.held is None:
            assert frame.k_valid is not None  # An extension always has the validity of slots.
            valid[:, :count] = frame.k_valid[:, :count]
            valid[:, known:] = frame.k_valid[:, capacity:]
        return valid

    def _operands(self) -> tuple[Tensor, Tensor, Tensor]:
        solved, sizes, ratios = super()._operands()
        plan, (b, count, n, e) = self.plan, self.past_solved.shape
        if self.known == 0:
            return solved, sizes, ratios
        is_valid = self.valid[:, :count, None, None]
        by_head = solved.view(b, n, plan.tokens, plan.step)[:, :, : self.known]
        y = self.past_solved.new_zeros(by_head.shape)
        y[:, :, :count, :e] = torch.where(is_valid, self.past_solved, 0.0).transpose(1, 2)
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


def extend(
    leaf: LucidSolve, past: Mapping[str, Tensor], x: Mapping[str, Tensor], frame: Frame
) -> tuple[Tensor, Updates]:
    """y of the new tokens (b, t, n, e), and the updates of the buffers; `past` is by slot."""
    matrix = ExtendedMatrix(leaf, past, x, frame)
    return _solved(matrix)


def _solved(matrix: ExtendedMatrix) -> tuple[Tensor, Updates]:
    leaf, plan, v = matrix.leaf, matrix.plan, matrix.x["v"]
    k = matrix.x["k"][:, matrix.known :]
    y = torch.empty_like(v, memory_format=torch.contiguous_format)
    rho = torch.empty_like(y) if leaf.beta else None
    matrix.solve(v, y, rho)
    updates: Updates = {"key": Append(k), "solved": Append(y)}
    if leaf.normalize == "keys":
        reciprocal = matrix.prepared.reciprocal.view(plan.b, plan.n, plan.tokens)
        updates["rms"] = Append(1.0 / reciprocal[:, :, matrix.known : plan.s].transpose(1, 2))
    return y, updates


def extend_and_attend(
    leaf: LucidSolve,
    scale: float,
    past: Mapping[str, Tensor],
    x: Mapping[str, Tensor],
    frame: Frame,
) -> tuple[Tensor, Tensor, Updates]:
    """The output (b, t, h, e) of softmax attention to y, y, and the updates of `extend`."""
    matrix = ExtendedMatrix(leaf, past, x, frame)
    y, updates = _solved(matrix)
    count, known, t = matrix.past_solved.shape[1], matrix.known, y.shape[1]
    valid = torch.cat((matrix.valid[:, :count], matrix.valid[:, known:]), 1)
    keys = torch.cat((past["key"][:, :count], x["k"]), 1)
    values = torch.cat((matrix.past_solved, y), 1)
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
    return out, y, updates


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
