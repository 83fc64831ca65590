"""Second derivatives of PyTorch's fused attention, whose kernels have none, and far scores.

With `create_graph=True` the gradient has to be differentiable. Then the kernel's gradient is
replaced by that of PyTorch's unfused attention, which has all derivatives and takes quadratic
memory. So is it on a CPU for far scores: the kernel computes them twice, and e^{S − λ} is wrong, or
infinite, if S is not rounded as it was for λ.
"""

from __future__ import annotations

import math
from typing import TypedDict

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = "ScaledDotProduct"
"""The beginning of the names of the kernels' nodes in autograd's graph."""


class SdpaOptions(TypedDict):
    """The options of a call of PyTorch's attention."""

    is_causal: bool
    scale: float
    enable_gqa: bool


def twice_differentiable(
    node: torch.autograd.graph.Node, inputs: tuple[Tensor, ...], options: SdpaOptions
) -> None:
    """Make the gradient of an attention's `node` differentiable; `inputs` are q, k and v."""
    while not node.name().startswith(KERNELS):
        if len(node.next_functions) != 1 or node.next_functions[0][0] is None:
            return  # Unfused attention, which PyTorch differentiates.
        node = node.next_functions[0][0]

    def replace(
        gradients: tuple[Tensor, ...], cotangents: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        is_differentiated = torch.is_grad_enabled()
        if not is_differentiated and not _have_far_scores(inputs[0], inputs[1], options["scale"]):
            return None
        wanted = [i for i, gradient in enumerate(gradients[:3]) if gradient is not None]
        padding = gradients[wanted[0]].shape[-1] - inputs[wanted[0]].shape[-1]
        with torch.enable_grad():
            padded = [functional.pad(a, (0, padding)) for a in inputs]
        if any(gradients[i].shape != padded[i].shape for i in wanted):
            raise NotImplementedError(
                "this fused attention of PyTorch has no second derivative; "
                'call with backend="reference"'
            )
        with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            again = functional.scaled_dot_product_attention(*padded, **options)
        targets = [padded[i] for i in wanted]
        result = torch.autograd.grad(again, targets, cotangents[0], create_graph=is_differentiated)
        differentiable = dict(zip(wanted, result, strict=True))
        return tuple(differentiable.get(i, gradient) for i, gradient in enumerate(gradients))

    node.register_hook(replace)


FAR = 2.0**16
"""Scores whose rounding in float32 may change weights by more than half a percent."""


def _have_far_scores(q: Tensor, k: Tensor, scale: float) -> bool:
    """Whether s ⟨q, k⟩ of the longest rows may exceed `FAR`, on a CPU."""
    if not q.is_cpu or 0 in (q.numel(), k.numel()):
        return False
    longest = (torch.linalg.vector_norm(x, dim=-1).amax().item() for x in (q, k))
    is_far: bool = math.prod(longest) * scale > FAR
    return is_far
