"""Comparisons, slices of inputs, and calls that several tests of identities share."""

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


def alone(x, i):
    """The inputs of sequence i of a batch; inputs of fewer than three axes have no batch axis."""
    return {name: array[i : i + 1] if array.ndim >= 3 else array for name, array in x.items()}


def central_differences(loss, x, step=1e-5):
    """The gradient of a function of one array."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        ends = []
        for sign in (1, -1):
            moved = x.copy()
            moved[index] += sign * step
            ends.append(loss(moved))
        gradient[index] = (ends[0] - ends[1]) / (2 * step)
    return gradient


def assert_gradients_are_central_differences(layer, x, cotangent, tolerance=1e-7):
    """The gradient of every input, by `vjp`, to a share of its largest entry (or of 1)."""
    _, pullback = layer.vjp(**x)
    gradients = pullback(cotangent)
    assert set(gradients) == set(x)
    for name, gradient in gradients.items():
        assert gradient.shape == x[name].shape
        expected = central_differences(
            lambda moved, name=name: np.sum(cotangent * layer(**(x | {name: moved}))), x[name]
        )
        assert np.abs(gradient - expected).max() <= tolerance * max(1, np.abs(expected).max())
