"""Layers whose tokens are divided among processes.

`precondattn.parallel` divides the mechanism. Everything else in a layer is computed token by token,
with two exceptions: rotary embeddings need the positions of the tokens in their sequence, and a
short convolution of size c needs the c − 1 rows before each part of the tokens, which are
exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import Module

from precondattn.algebra.mechanism import Mechanism
from precondattn.layers.checks import LayerCall
from precondattn.layers.functions import causal_convolution
from precondattn.layers.torch.attention import Attention
from precondattn.layers.torch.divided_weights import check_apart

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from precondattn.parallel.layouts import TokenPart


def divide_tokens(model: Module, mesh: DeviceMesh, *, layout: str = "heads") -> None:
    """Make every `Attention` of a model work on tokens that are divided among processes.

    Afterwards every process of the mesh calls the model with its part of the tokens, and gets the
    outputs for them. The gradient of a weight is this process's term, as in data parallelism, so
    include the processes of this mesh in `DistributedDataParallel` or `fully_shard`.

    Parameters
    ----------
    model : nn.Module
        A model with `Attention` layers, such as a `Decoder`, or one `Attention`.
    mesh : DeviceMesh
        A mesh of one dimension.
    layout : str
        "heads", "contiguous", "zigzag" or "cyclic[block=B]", as in
        `precondattn.parallel.torch.context_parallel`. In the first two, the tokens of process i
        follow those of process i − 1; for the others `to_layout` orders them.

    Raises
    ------
    TypeError, ValueError
        for a model without `Attention`, and the errors of `context_parallel`.

    Examples
    --------
    In each of four processes started by `torchrun`:

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from precondattn.layers.torch import Decoder, divide_tokens
    >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))  # doctest: +SKIP
    >>> model = Decoder(100, 32, heads=4, layers=["lucid", "gated_delta"])
    >>> divide_tokens(model, mesh["cp"])  # doctest: +SKIP
    >>> logits = model(tokens)  # This process's tokens.  # doctest: +SKIP
    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if not layers:
        raise ValueError(f"model has no Attention; found {type(model).__name__}")
    divided = [DividedTokens(layer.mechanism, mesh, layout) for layer in layers]
    for layer in layers:
        if layer.divided_weights is not None:
            check_apart("divide_tokens", mesh, layer.divided_weights.mesh)
    for layer, of_layer in zip(layers, divided, strict=True):
        layer.divided = of_layer


class DividedTokens:
    """The mechanism of a layer whose tokens are divided among processes."""

    def __init__(self, mechanism: Mechanism, mesh: DeviceMesh, layout: str) -> None:
        from precondattn.parallel.layouts import TokenOrder
        from precondattn.parallel.torch import context_parallel

        self.mechanism = context_parallel(mechanism, mesh, layout=layout)
        self.order = TokenOrder.read("contiguous" if layout == "heads" else layout)

    def __deepcopy__(self, memo: dict[int, object]) -> DividedTokens:
        return self  # A copy has the same processes.

    def tokens_of_process(self, call: LayerCall) -> TokensOfProcess:
        """The places of this process's rows x (b, t, width) in their sequences."""
        refused = "mask", "cache", "segment_ids", "cu_seqlens", "attn_mask", "prefix"
        call.refuse(self.mechanism.owner, *refused)
        rows = self.mechanism.processes.agree(None, "a layer", (call.x.shape[1],))
        return TokensOfProcess(self, self.order.parts([row[0] for row in rows]), call.x.device)


@dataclass(frozen=True)
class TokensOfProcess:
    """The tokens of one call."""

    divided: DividedTokens
    parts: tuple[TokenPart, ...]
    """All parts of the sequence, in the order of the sequence"""
    device: torch.device

    @property
    def of_process(self) -> list[tuple[int, TokenPart]]:
        """This process's parts, with their indices."""
        rank = self.divided.mechanism.processes.rank
        return [(i, part) for i, part in enumerate(self.parts) if part.device == rank]

    def ends(self, number: int) -> Iterator[tuple[int, slice, slice]]:
        """The index of each of this process's parts, its last rows, and their places at the end."""
        for i, part in self.of_process:
            start = max(part.rows.stop - number, part.rows.start)
            yield i, slice(start, part.rows.stop), slice(number - part.rows.stop + start, None)

    @property
    def positions(self) -> Tensor:
        """The positions (1, t) of this process's tokens in their sequences."""
        from precondattn.parallel.torch.tokens import positions_of

        rank = self.divided.mechanism.processes.rank
        return positions_of(self.parts, rank, self.device)[None]

    def convolved(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`causal_convolution` of each part of the rows (b, t, …), after the rows before it."""
        number = weight.shape[0] - 1
        shortest = min(part.tokens for part in self.parts[:-1]) if len(self.parts) > 1 else number
        if shortest < number:
            raise ValueError(
                f"{self.divided.mechanism.owner}: a convolution of size {number + 1} "
                f"needs parts of at least {number} tokens; found {shortest}"
            )
        before = _RowsBefore.apply(self, number, rows)
        return torch.cat(
            [
                causal_convolution(torch.cat([earlier, rows[:, part.rows]], 1), weight, bias)
                for earlier, (_, part) in zip(before, self.of_process, strict=True)
            ],
            1,
        )


class _RowsBefore(torch.autograd.Function):
    """The rows (own parts, b, number, …) before each of this process's parts; 0 before the first.

    Every process has it in its graph, also the one with the first part, because the gradient is
    exchanged.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, tokens: TokensOfProcess, number: int, rows: Tensor) -> Tensor:
        ctx.tokens, ctx.number, ctx.shape = tokens, number, rows.shape
        last = rows.new_zeros(len(tokens.parts), rows.shape[0], number, *rows.shape[2:])
        for i, where, kept in tokens.ends(number):
            last[i, :, kept] = rows[:, where]
        # Each process has other nonzero entries.
        torch.distributed.all_reduce(last, group=tokens.divided.mechanism.processes.group)
        return torch.stack(
            [last[i - 1] if i else torch.zeros_like(last[0]) for i, _ in tokens.of_process]
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, d_before: Tensor) -> tuple[Tensor | None, ...]:
        tokens, number = ctx.tokens, ctx.number
        d_last = d_before.new_zeros(len(tokens.parts), *d_before.shape[1:])
        for (i, _), d_first in zip(tokens.of_process, d_before, strict=True):
            if i:
                d_last[i - 1] = d_first
        torch.distributed.all_reduce(d_last, group=tokens.divided.mechanism.processes.group)
        d_rows = d_last.new_zeros(ctx.shape)
        for i, where, kept in tokens.ends(number):
            d_rows[:, where] += d_last[i, :, kept]
        return None, None, d_rows
