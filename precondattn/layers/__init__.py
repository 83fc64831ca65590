"""Attention layers: a mechanism whose inputs are computed from hidden states by recipes.

`precondattn.layers.torch` has modules of PyTorch, and `precondattn.layers.flax` of Flax NNX. Both
run the functions of `recipes/`, which are written for arrays of any library, on weights with the
same names and shapes. This package imports neither.
"""


def __getattr__(name: str) -> object:
    """Raise the error for a layer that is imported without its library."""
    if name in ("Attention", "Block", "Decoder", "VisionAttention", "VisionTransformer"):
        raise ImportError(f"import {name} from {__name__}.torch or {__name__}.flax")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
