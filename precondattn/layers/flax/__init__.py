"""Attention layers of Flax NNX: `from precondattn.layers.flax import Attention`."""

from precondattn.layers.flax.attention import Attention
from precondattn.layers.flax.decoder import Block, Decoder
from precondattn.layers.flax.weights import to_flax

__all__ = ["Attention", "Block", "Decoder", "to_flax"]
