"""LUCID's triangular solve with tokens divided among processes.

    E y = diag(β) v,    E = I + diag(β) stril(Φ)        (`spec/lucid.py`)

Rows are solved in blocks J, one after another in the order of the sequence:

    u_J = v_J − Σ_{earlier I} Φ_JI y_I,    y_J = (I + diag(β_J) stril(Φ_JJ))⁻¹ diag(β_J) u_J

The process that has block J solves it and broadcasts k_J and y_J. Every process then subtracts
Φ y_J from its later rows (`solve_blocks.py`). In the layout `cyclic`, the next solve and broadcast
overlap with this subtraction.

Φ y_J is softmax attention without normalisation (`parallel/solve.py`). Packed segments are
contiguous, so later rows can see only the last segment of J.

The backward pass goes through the blocks in reverse order, and starts with r = dy:

    g_J = du_J,    and for earlier columns I:    r_I −= Φ_JIᵀ g_J

g_J, and the gradients of k_J and β_J within the block, are the gradients of the block's solve for
the cotangent r_J. The owner broadcasts k_J and g_J. Every process attends from J to its earlier
columns, and computes the gradients of Φ y for the cotangent −g_J (`product_vjp`): of r, of its own
keys, and of k_J, which the owner adds up over processes. Finally dv = g.

Bytes: in the forward pass, k and y of a process's tokens go to all others. In the backward pass, k
and g do, and the gradients of k come back. y, g and gradients are float32 or wider.

With a divided cache of solved values, the sum over process r's tokens is the product of the new
keys with its cached keys. One exchange adds up the sums, and every process solves the system of the
new tokens:

    y_t = β_t (v_t − Σ_r Σ_{j of r} Φ_tj y_j − Σ_{new j < t} Φ_tj y_j)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from precondattn.arrays import Shape, upcast
from precondattn.parallel.layouts import TokenPart
from precondattn.parallel.solve import keys_of_scores, product, product_vjp
from precondattn.parallel.torch.solve_blocks import Failed, SolveBlocks, added, in_order
from precondattn.parallel.torch.step import DividedStep
from precondattn.parallel.ways import DividedPiece
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.rms_norm import rms, rms_norm, rms_norm_vjp


def output(piece: DividedPiece) -> Tensor:
    """The solved values y of this process's tokens."""
    x = piece.inputs
    return _Solved.apply(SolveBlocks(piece), x["k"], x["v"], x.get("lucid_beta"))


class _Solved(torch.autograd.Function):  # type: ignore[misc]
    """y of this process's rows. A process with an error takes part in all exchanges."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, blocks: SolveBlocks, k: Tensor, v: Tensor, beta: Tensor | None
    ) -> Tensor:
        u = upcast(v).clone()
        y, unit, failed = torch.zeros_like(u), keys_of_scores(blocks.leaf, k), Failed()

        def solve(block: TokenPart) -> None:
            y[:, block.rows] = blocks.leaf(**blocks.of_block(block, k, u, beta))

        def subtract(block: TokenPart, keys: Tensor, values: Tensor, rows: slice) -> None:
            visible, seen_by, masks = blocks.visible(block, rows, is_later=True)
            if visible:
                tokens = unit[:, rows], keys_of_scores(blocks.leaf, keys), values
                u[:, rows] -= product(blocks.leaf, *tokens, seen_by, **masks)

        in_order(blocks, blocks.all, (k, y), blocks.later, solve, subtract, failed)
        blocks.processes.agree(failed.error)
        ctx.blocks = blocks
        ctx.save_for_backward(k, v, u, y, *(() if beta is None else (beta,)))
        return y.to(v.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: FunctionCtx, d_y: Tensor) -> tuple[Tensor | None, ...]:
        blocks: SolveBlocks = ctx.blocks
        k, v, u, y, *more = ctx.saved_tensors
        beta = more[0] if more else None
        unit = keys_of_scores(blocks.leaf, k)
        r, g = d_y.to(u.dtype).clone(), torch.zeros_like(u)
        d_unit, d_k = torch.zeros_like(unit), torch.zeros_like(unit)
        d_beta = None if beta is None else torch.zeros_like(upcast(beta))
        failed = Failed()
        parts: dict[int, Tensor] = {}

        def solve(block: TokenPart) -> None:
            _, pull = blocks.leaf.vjp(**blocks.of_block(block, k, u, beta))
            gradients = pull(r[:, block.rows])
            g[:, block.rows] = gradients["v"]
            d_k[:, block.rows] += gradients["k"]
            if d_beta is not None:
                d_beta[:, block.rows] = gradients["lucid_beta"]

        def subtract(block: TokenPart, keys: Tensor, of_block: Tensor, rows: slice) -> None:
            visible, seen_by, masks = blocks.visible(block, rows, is_later=False)
            if not visible:
                return
            tokens = keys_of_scores(blocks.leaf, keys), unit[:, rows], y[:, rows]
            gradients = product_vjp(blocks.leaf, *tokens, -of_block, seen_by, **masks)
            d_unit[:, rows] += gradients["k"]
            r[:, rows] += gradients["v"]
            parts[block.first] = parts.get(block.first, 0) + gradients["q"]

        def collect(block: TokenPart, keys: Tensor) -> None:
            total = parts.pop(block.first, None)
            if total is None:
                total = torch.zeros_like(keys_of_scores(blocks.leaf, keys))
            total = added(blocks, block, total.contiguous())
            if block.device == blocks.rank:
                d_unit[:, block.rows] += total

        order = blocks.all[::-1]
        in_order(blocks, order, (k, g), blocks.earlier, solve, subtract, failed, collect)
        blocks.processes.agree(failed.error)
        if blocks.leaf.normalize == "keys":
            d_k += rms_norm_vjp(upcast(k), blocks.leaf.eps, d_unit)
        else:
            d_k += d_unit
        d_beta = None if beta is None or d_beta is None else d_beta.to(beta.dtype)
        return None, d_k.to(k.dtype), g.to(v.dtype), d_beta


def prefilled(
    piece: DividedPiece, begin: Mapping[str, Tensor] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """y of this process's tokens, and their rows by slot name."""
    y = output(piece)
    return y, _rows(piece.leaf, piece.inputs["k"], y)


def part_shape(step: DividedStep) -> Shape:
    """The shape of the sums, one for each new value (b, t, n, e)."""
    return tuple(step.inputs["v"].shape)


def part(step: DividedStep) -> Tensor:
    """The sum of Φ y over this process's rows."""
    leaf, k = step.leaf, upcast(step.inputs["k"])
    if not step.rows:
        return torch.zeros(part_shape(step), dtype=k.dtype, device=k.device)
    keys, y = upcast(step.past["key"]), upcast(step.past["solved"])
    if leaf.normalize == "keys":
        r = step.past["rms"][..., None]  # Unused rows have 0.
        k, keys = rms_norm(k, leaf.eps), keys / torch.where(r > 0, r, 1.0)
    return product(leaf, k, keys, y, None, **step.of_past())


def stepped(step: DividedStep, parts: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """y of the new tokens, and their rows by slot name."""
    assert parts is not None  # `part_shape` is not None.
    inputs = {name: upcast(x) for name, x in step.inputs.items()}
    inputs["v"] = inputs["v"] - parts.sum(0)
    y = step.leaf(**inputs, **step.of_new()).to(step.inputs["v"].dtype)
    return y, _rows(step.leaf, step.inputs["k"], y)


def _rows(leaf: LucidSolve, k: Tensor, y: Tensor) -> dict[str, Tensor]:
    rows = {"key": k, "solved": y}
    if leaf.normalize == "keys":
        rows["rms"] = rms(upcast(k), leaf.eps)[..., 0]
    return rows
