"""Attention layers of PyTorch: `from precondattn.layers.torch import Attention`."""

from precondattn.layers.torch.attention import Attention
from precondattn.layers.torch.block import Block
from precondattn.layers.torch.decoder import Decoder
from precondattn.layers.torch.divided import divide_tokens
from precondattn.layers.torch.divided_weights import divide_weights
from precondattn.layers.torch.module import to_torch
from precondattn.layers.torch.vision_transformer import VisionAttention, VisionTransformer

__all__ = [
    "Attention",
    "Block",
    "Decoder",
    "VisionAttention",
    "VisionTransformer",
    "divide_tokens",
    "divide_weights",
    "to_torch",
]
