"""Attention layers: a mechanism, and how its inputs are made from the hidden states of a model.

`precondattn.layers.torch` has modules of PyTorch, `precondattn.layers.flax` of Flax NNX. Both run
the functions of `recipes/`, which are written for arrays of any library, on weights of the same
names and shapes. Nothing is imported here.
"""
