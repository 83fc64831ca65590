"""Attention layers of Flax NNX: `from precondattn.layers.flax import Attention`."""

from precondattn.layers.flax.attention import Attention
from precondattn.layers.flax.block import Block
from precondattn.layers.flax.decoder import Decoder
from precondattn.layers.flax.divided import divide_tokens
from precondattn.layers.flax.module import to_flax
from precondattn.layers.flax.vision_transformer import VisionAttention, VisionTransformer

__all__ = [
    "Attention",
    "Block",
    "Decoder",
    "VisionAttention",
    "VisionTransformer",
    "divide_tokens",
    "to_flax",
]
