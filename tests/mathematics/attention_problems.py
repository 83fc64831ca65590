"""Scores of softmax attention."""

import numpy as np


def logits(q, k, bias=None, scale=None):
    """scale · q kᵀ + bias of shape (b, h, t, s), without masks; the scale is 1/√d by default."""
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    products = scale * np.einsum("bthd,bshd->bhts", q, k)
    return products if bias is None else products + bias
