"""Second derivatives of PyTorch's fused attention, whose kernels have none.

Where `create_graph=True` asks for a gradient that can be differentiated, the kernel's gradient is
replaced by that of PyTorch's unfused attention, which has all derivatives and quadratic memory.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = "ScaledDotProduct"
"""How the names of the kernels' nodes in autograd's graph begin."""


class SdpaOptions(TypedDict):
    """How an attention was called."""

    is_causal: bool
    scale: float
    enable_gqa: bool


def twice_differentiable(
    node: torch.autograd.graph.Node, inputs: tuple[Tensor, ...], options: SdpaOptions
) -> None:
    """Let the gradient of an attention's `node` on `inputs` q, k, v be differentiable."""
    while not node.name().startswith(KERNELS):
        if len(node.next_functions) != 1 or node.next_functions[0][0] is None:
            return  # Unfused attention, which PyTorch differentiates.
        node = node.next_functions[0][0]

    def replace(
        gradients: tuple[Tensor, ...], cotangents: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        if not torch.is_grad_enabled():  # No graph of the gradient is wanted.
            return None
        wanted = [i for i, gradient in enumerate(gradients[:3]) if gradient is not None]
        padding = gradients[wanted[0]].shape[-1] - inputs[wanted[0]].shape[-1]
        padded = [functional.pad(a, (0, padding)) for a in inputs]
        if any(gradients[i].shape != padded[i].shape for i in wanted):
            raise NotImplementedError(
                "this fused attention of PyTorch has no second derivative; "
                'call with backend="reference"'
            )
        with sdpa_kernel(SDPBackend.MATH):
            again = functional.scaled_dot_product_attention(*padded, **options)
        targets = [padded[i] for i in wanted]
        result = torch.autograd.grad(again, targets, cotangents[0], create_graph=True)
        differentiable = dict(zip(wanted, result, strict=True))
        return tuple(differentiable.get(i, gradient) for i, gradient in enumerate(gradients))

    node.register_hook(replace)
