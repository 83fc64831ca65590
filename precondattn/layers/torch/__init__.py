"""Attention layers of PyTorch: `from precondattn.layers.torch import Attention`."""

from precondattn.layers.torch.attention import Attention
from precondattn.layers.torch.block import Block
from precondattn.layers.torch.decoder import Decoder
from precondattn.layers.torch.weights import to_torch
from precondattn.layers.torch.xca import LocalPatchInteraction, XCABlock

__all__ = ["Attention", "Block", "Decoder", "LocalPatchInteraction", "XCABlock", "to_torch"]
