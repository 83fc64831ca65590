"""Norms, activations and the loss of flash-linear-attention, with the arguments of its functions.

    rms_norm(x) = x / √(mean(x²) + ε) · w + b,     gated: rms_norm(x) · act(g)
    swiglu(x, y) = swish(x) y

Norms are computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, silu

from precondattn.arrays import Tree


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tree:
    """The norm of x + residual, and with `prenorm` that sum too."""
    total = x.float() if residual is None else x.float() + residual.float()
    y = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    y = y.to(x.dtype)
    if not prenorm:
        return y
    if residual is not None:
        return y, total.to(residual.dtype)
    return y, total if residual_in_fp32 else x


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tree:
    """The norm of x + residual times the activated gate, and with `prenorm` that sum too."""
    if activation not in ("swish", "silu", "sigmoid"):
        raise ValueError(f"activation: 'swish' or 'sigmoid' expected; found {activation!r}")
    y, total = rms_norm(x.float(), weight, bias, residual, eps, True, residual_in_fp32)
    gate = g.float().sigmoid() if activation == "sigmoid" else silu(g.float())
    y = (y * gate).to(x.dtype)
    return (y, total) if prenorm else y


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tree:
    """A linear map of the norm."""
    y, total = rms_norm(x, norm_weight, norm_bias, residual, eps, True, residual_in_fp32)
    y = linear(y, linear_weight, linear_bias)
    return (y, total) if prenorm else y


def swish(x: Tensor) -> Tensor:
    """x σ(x)."""
    return silu(x)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """swish(x) y."""
    return silu(x) * y


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear map of swish(x) y."""
    return linear(silu(x) * y, weight, bias)


class CrossEntropy(nn.Module):
    """The loss of logits, or of hidden states with the weights of the last layer."""

    ignore_index = -100

    def __init__(self) -> None:
        super().__init__()
        self.reduction = "mean"

    def forward(
        self, x: Tensor, labels: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        logits = x if weight is None else linear(x, weight, bias)
        return cross_entropy(
            logits.flatten(0, -2).float(), labels.flatten(), reduction=self.reduction
        )
