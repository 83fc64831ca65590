"""Comparisons, slices of inputs, and calls that several tests of identities share."""

from itertools import pairwise

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


def changed_from(x, time):
    """The inputs with other numbers from a time on."""
    changed = {name: array.copy() for name, array in x.items()}
    for array in changed.values():
        if array.ndim >= 3:
            array[:, time:] += 0.25
    return changed


def extended_in_pieces(layer, x, cuts):
    """The output of extending an empty cache by the tokens between each two cuts."""
    cache, outs = layer.init_cache(**x, capacity=cuts[-1]), []
    for start, stop in pairwise(cuts):
        out, cache = layer.extend(cache, **part(x, slice(start, stop)))
        outs.append(out)
    return np.concatenate(outs, axis=1)


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


def extended_by_lengths(layer, x, pieces, lengths):
    """Outputs (2, t, …) of extending an empty cache by pieces, and which tokens (2, t) are valid.

    `lengths` has, for each piece, the number of its valid tokens in each of two sequences.
    """
    t = pieces[-1].stop
    cache, outs, valid = layer.init_cache(**x, capacity=t), [], np.zeros((2, t), dtype=bool)
    for piece, counts in zip(pieces, lengths, strict=True):
        for i, count in enumerate(counts):
            valid[i, piece.start : piece.start + count] = True
        out, cache = layer.extend(cache, **part(x, piece), lengths=counts)
        outs.append(out)
    assert np.asarray(cache.length).tolist() == valid.sum(1).tolist()
    return np.concatenate(outs, axis=1), valid
