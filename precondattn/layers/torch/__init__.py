"""Attention layers of PyTorch: `from precondattn.layers.torch import Attention`."""

from precondattn.layers.torch.attention import Attention

__all__ = ["Attention"]
