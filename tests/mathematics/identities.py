"""Comparisons, scores and slices of inputs that several tests of identities share."""

import numpy as np


def assert_close(actual, expected, size=None):
    """Equality to 1e-10 of `size`, by default the largest expected number."""
    expected = np.broadcast_to(expected, np.shape(actual))
    size = np.max(np.abs(expected), initial=0.0) if size is None else size
    assert np.max(np.abs(actual - expected), initial=0.0) <= 1e-10 * size


def part(x, chosen):
    """The inputs at some times; inputs of fewer than three axes have no time axis."""
    return {name: array[:, chosen] if array.ndim >= 3 else array for name, array in x.items()}


def causal_mask(t, s, window=None):
    """(t, s). Query i has position i + s − t and attends to the last `window` tokens."""
    distance = np.arange(t)[:, None] + s - t - np.arange(s)
    return (distance >= 0) & (distance < (s if window is None else window))


def identity_values(k):
    """Values (b, s, n, s) for which the output is the matrix that maps values to outputs."""
    b, s, n, _ = k.shape
    return np.broadcast_to(np.eye(s)[:, None], (b, s, n, s)).copy()


def grouped(x, group):
    """(b, s, h, ·) as (b, s, n, group, ·)."""
    return x.reshape(*x.shape[:2], x.shape[2] // group, group, x.shape[-1])


def logits(q, k, bias=None, scale=None):
    """scale · q kᵀ + bias of shape (b, h, t, s), without masks; the scale is 1/√d by default."""
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    products = scale * np.einsum("bthd,bshd->bhts", q, k)
    return products if bias is None else products + bias
