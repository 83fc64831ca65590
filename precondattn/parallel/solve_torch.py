"""LUCID's triangular solve, when its tokens are divided among processes.

    E y = diag(β) v,    E = I + diag(β) stril(Φ)        (`spec/lucid.py`)

Rows are solved in blocks J, one after another in the order of the sequence:

    u_J = v_J − Σ_{earlier I} Φ_JI y_I,    y_J = (I + diag(β_J) stril(Φ_JJ))⁻¹ diag(β_J) u_J

The process that has block J solves it, and gives k_J and y_J to all, each of which subtracts Φ y_J
from its later rows. The next block's owner begins with that block, solves it and gives it away
while all others, and it too, subtract from their other rows: so the exchange and the short solve
are hidden where blocks go around the processes (`cyclic`).

Φ y_J is softmax attention without its division: with the output o and log-sum-exp λ of rows that
attend to the keys of J,

    Φ y_J = e^{λ − s d} o,

which is bounded as Φ is, and which every backend computes. A packed segment is consecutive: later
rows can see the last segment of J only.

Backward, in reverse order, with r = dy at first:

    g_J = du_J,    and for earlier columns I:    r_I −= Φ_JIᵀ g_J

where g_J, and the gradients of k_J and β_J within the block, are those of the block's solve for the
cotangent r_J. Its owner gives k_J and g_J to all, each of which attends from J to its earlier
columns, and pulls back e^{λ − s d} o for the cotangent −g_J: to r, to its own keys, and to k_J,
whose parts the owner adds up. dv = g.

Bytes: forward k and y of a process's tokens go to all others; backward k and g, and the gradients
of k come back. y, g and gradients are float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from precondattn.arrays import upcast
from precondattn.parallel.call_torch import tried
from precondattn.parallel.layouts import Order, Part
from precondattn.parallel.piece_torch import Piece, crossing
from precondattn.partial_attention import with_lse, with_lse_vjp
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.metric import DOT
from precondattn.spec.rms_norm import rms_norm, rms_norm_vjp
from precondattn.spec.softmax import Softmax

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Leaf

MASKS = ("lengths", "key_mask", "segment_ids", "cu_seqlens")
PASSED = "a block of solved values of another process at a time"
BLOCK = 512
"""The most tokens that are solved before they are given away."""


def refusal(leaf: Leaf, order: Order) -> str | None:
    """Why a solve can not be divided; None where it can."""
    assert isinstance(leaf, LucidSolve)  # It has been chosen by that.
    if leaf.metric is not DOT:
        return f"divides solves of dot products; found the metric {leaf.metric.name}; use 'heads'"
    if leaf.window is not None or leaf.normalize == "rows":
        return "divides solves without a window or normalize=rows; use the layout 'heads'"
    return None


def output(piece: Piece) -> Tensor:
    """y of this process's tokens."""
    x = piece.inputs
    out: Tensor = _Solved.apply(Blocks(piece), x["k"], x["v"], x.get("lucid_beta"))
    return out


def bytes_sent(piece: Piece) -> dict[str, int]:
    """Forward, by this process to all others."""
    others = piece.processes.devices - 1
    k, v = piece.inputs["k"], piece.inputs["v"]
    wide = 8 if v.dtype == torch.float64 else 4
    return {"k": others * k.numel() * k.dtype.itemsize, "y": others * v.numel() * wide}


@dataclass(frozen=True)
class Blocks:
    """The blocks of a solve, and what is done between them."""

    piece: Piece

    @cached_property
    def all(self) -> tuple[Part, ...]:
        """In the order of the sequence."""
        return tuple(
            Part(part.device, slice(start, min(start + BLOCK, part.rows.stop)), first)
            for part in self.piece.parts
            for start, first in zip(
                range(part.rows.start, part.rows.stop, BLOCK),
                range(part.first, part.first + part.tokens, BLOCK),
                strict=True,
            )
        )

    @property
    def rank(self) -> int:
        return self.piece.processes.rank

    @property
    def leaf(self) -> LucidSolve:
        leaf = self.piece.leaf
        assert isinstance(leaf, LucidSolve)
        return leaf

    @cached_property
    def own(self) -> tuple[Part, ...]:
        """Those of this process."""
        return tuple(block for block in self.all if block.device == self.rank)

    def later(self, block: Part) -> slice:
        """This process's rows after a block."""
        count = self.piece.count(self.rank)
        starts = (own.rows.start for own in self.own if own.first > block.first)
        return slice(next(starts, count), count)

    def earlier(self, block: Part) -> slice:
        """This process's rows before a block."""
        stops = (own.rows.stop for own in reversed(self.own) if own.first < block.first)
        return slice(0, next(stops, 0))

    def unit(self, k: Tensor) -> Tensor:
        """The keys of the scores."""
        return rms_norm(upcast(k), self.leaf.eps) if self.leaf.normalize == "keys" else upcast(k)

    def softmax(self, d: int) -> tuple[Softmax, float]:
        """The attention whose exponentials are Φ, and the shift s d."""
        scale = self.leaf.scale_for(d)
        shift = scale * d if self.leaf.has_unit_diagonal else 0.0
        return Softmax(causal=False, scale=scale), shift

    def of_block(self, block: Part, k: Tensor, u: Tensor, beta: Tensor | None) -> dict[str, Any]:
        """The arguments of the block's own solve."""
        rows = block.rows
        given = {"k": upcast(k[:, rows]), "v": u[:, rows]}
        if beta is not None:
            given["lucid_beta"] = upcast(beta[:, rows])
        return {**given, **self.piece.masks.of(self.rank, rows), "backend": self.piece.backend}

    def visible(
        self, block: Part, rows: slice, at: int
    ) -> tuple[Tensor | None, Tensor | None, bool]:
        """Which tokens of a block (b, B) and of this process's rows (b, t) have pairs that are not
        masked; `at` is −1 for rows after the block, and 0 for rows before it."""
        masks = self.piece.masks
        of_block, of_rows = masks.segment_of(block.device), masks.segment_of(self.rank)
        both = crossing(
            None if of_block is None else of_block[:, block.rows],
            at,
            None if of_rows is None else of_rows[:, rows],
        )
        tokens, others = both if both is not None else (None, None)
        any_visible = others is None or bool(others.any())
        return tokens, others, any_visible

    def given_away(self, block: Part, arrays: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """The owner's rows of the block, on all processes, and what to wait for."""
        _, group, rank, devices, _ = self.piece.processes
        if block.device == rank:
            sent = [x[:, block.rows].contiguous() for x in arrays]
        else:
            sent = [x.new_empty(x.shape[0], block.tokens, *x.shape[2:]) for x in arrays]
        if devices == 1:
            return sent, ()
        source = dist.get_global_rank(group, block.device)
        return sent, [dist.broadcast(x, source, group=group, async_op=True) for x in sent]


class _Solved(torch.autograd.Function):  # type: ignore[misc]
    """y of this process's rows. A process that has an error takes part to the end."""

    @staticmethod
    def forward(ctx: Any, blocks: Blocks, k: Tensor, v: Tensor, beta: Tensor | None) -> Tensor:
        u = upcast(v).clone()
        y, unit = torch.zeros_like(u), blocks.unit(k)
        softmax, shift = blocks.softmax(k.shape[-1])
        failed = _Failed()

        def solve(block: Part) -> None:
            y[:, block.rows] = blocks.leaf(**blocks.of_block(block, k, u, beta))

        def subtract(block: Part, keys: Tensor, values: Tensor, rows: slice) -> None:
            seen, seen_by, some = blocks.visible(block, rows, -1)
            if rows.start >= rows.stop or not some:
                return
            masks = {} if seen is None else {"key_mask": seen}
            given = (unit[:, rows], blocks.unit(keys), values)
            out, lse = with_lse(softmax, *given, **masks, backend=blocks.piece.backend)
            product = torch.exp(lse - shift)[..., None] * out
            if seen_by is not None:
                product = product.masked_fill(~seen_by[..., None, None], 0)
            u[:, rows] -= product

        _in_order(blocks, blocks.all, (k, y), blocks.later, solve, subtract, failed)
        blocks.piece.processes.agree(failed.error)
        ctx.blocks = blocks
        ctx.save_for_backward(k, v, u, y, *(() if beta is None else (beta,)))
        return y.to(v.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_y: Tensor) -> Any:
        blocks: Blocks = ctx.blocks
        k, v, u, y, *more = ctx.saved_tensors
        beta = more[0] if more else None
        unit = blocks.unit(k)
        r, g = d_y.to(u.dtype).clone(), torch.zeros_like(u)
        d_unit, d_k = torch.zeros_like(unit), torch.zeros_like(unit)
        d_beta = None if beta is None else torch.zeros_like(upcast(beta))
        softmax, shift = blocks.softmax(k.shape[-1])
        failed = _Failed()
        parts: dict[int, Tensor] = {}

        def solve(block: Part) -> None:
            _, pull = blocks.leaf.vjp(**blocks.of_block(block, k, u, beta))
            gradients = pull(r[:, block.rows])
            g[:, block.rows] = gradients["v"]
            d_k[:, block.rows] += gradients["k"]
            if d_beta is not None:
                d_beta[:, block.rows] = gradients["lucid_beta"]

        def subtract(block: Part, keys: Tensor, of_block: Tensor, rows: slice) -> None:
            seen_by, seen, some = blocks.visible(block, rows, 0)
            if rows.start >= rows.stop or not some:
                return
            masks = {} if seen is None else {"key_mask": seen}
            given = (blocks.unit(keys), unit[:, rows], y[:, rows])
            (out, lse), pull = with_lse_vjp(softmax, *given, **masks, backend=blocks.piece.backend)
            weight = torch.exp(lse - shift)
            if seen_by is not None:
                weight = weight.masked_fill(~seen_by[..., None], 0)
            d_out = -weight[..., None] * of_block
            gradients = pull(d_out, (d_out * out).sum(-1))
            d_unit[:, rows] += gradients["k"]
            r[:, rows] += gradients["v"]
            parts[block.first] = parts.get(block.first, 0) + gradients["q"]

        def collect(block: Part, keys: Tensor) -> None:
            total = parts.pop(block.first, None)
            if total is None:
                total = torch.zeros_like(blocks.unit(keys))
            total = _added(blocks, block, total.contiguous())
            if block.device == blocks.rank:
                d_unit[:, block.rows] += total

        order = blocks.all[::-1]
        _in_order(blocks, order, (k, g), blocks.earlier, solve, subtract, failed, collect)
        blocks.piece.processes.agree(failed.error)
        if blocks.leaf.normalize == "keys":
            d_k += rms_norm_vjp(upcast(k), blocks.leaf.eps, d_unit)
        else:
            d_k += d_unit
        d_beta = None if beta is None or d_beta is None else d_beta.to(beta.dtype)
        return None, d_k.to(k.dtype), g.to(v.dtype), d_beta


class _Failed:
    """The first error of this process."""

    error: Exception | None = None

    def run(self, function: Callable[[], None]) -> None:
        if self.error is None:
            _, self.error = tried(function)


def _in_order(
    blocks: Blocks,
    order: Sequence[Part],
    arrays: tuple[Tensor, Tensor],
    rest: Callable[[Part], slice],
    solve: Callable[[Part], None],
    subtract: Callable[[Part, Tensor, Tensor, slice], None],
    failed: _Failed,
    collect: Callable[[Part, Tensor], None] | None = None,
) -> None:
    """Solve the blocks, give each to all, and subtract it from the rest of the rows.

    A process that has the next block does that first, and gives it away before it does the others.
    """
    if order[0].device == blocks.rank:
        failed.run(lambda: solve(order[0]))
    given, works = blocks.given_away(order[0], arrays)
    for number, block in enumerate(order):
        for work in works:
            work.wait()
        (keys, values), rows = given, rest(block)
        following = order[number + 1] if number + 1 < len(order) else None
        if following is not None:
            if following.device == blocks.rank:
                first = following.rows
                failed.run(lambda: subtract(block, keys, values, first))  # noqa: B023
                failed.run(lambda: solve(following))  # noqa: B023
                # Its rows are the first or the last of the rest.
                rows = (
                    slice(first.stop, rows.stop)
                    if first.start == rows.start
                    else slice(rows.start, first.start)
                )
            given, works = blocks.given_away(following, arrays)
        failed.run(lambda: subtract(block, keys, values, rows))  # noqa: B023
        if collect is not None:
            collect(block, keys)


def _added(blocks: Blocks, block: Part, x: Tensor) -> Tensor:
    """The sum of all processes' x, on the process that has the block."""
    _, group, _, devices, _ = blocks.piece.processes
    if devices > 1:
        dist.reduce(x, dist.get_global_rank(group, block.device), group=group)
    return x
