"""What the tests of identities have in common."""

import numpy as np


def assert_close(actual, expected, size=None):
    """Equality to 1e-10 of `size`, by default the largest expected number."""
    expected = np.broadcast_to(expected, np.shape(actual))
    size = np.max(np.abs(expected), initial=0.0) if size is None else size
    assert np.max(np.abs(actual - expected), initial=0.0) <= 1e-10 * size


def part(x, chosen):
    """The inputs at some times; those of fewer than three axes are about no time."""
    return {name: array[:, chosen] if array.ndim >= 3 else array for name, array in x.items()}


def causal_mask(t, s, window=None):
    """Query i stands at position i + s − t, and sees the last `window` tokens."""
    distance = np.arange(t)[:, None] + s - t - np.arange(s)
    return (distance >= 0) & (distance < (s if window is None else window))


def identity_values(k):
    """Values (b, s, n, s) through which an output becomes the matrix that maps values to it."""
    b, s, n, _ = k.shape
    return np.broadcast_to(np.eye(s)[:, None], (b, s, n, s)).copy()


def solved_values(k, v, eps=1e-6):
    """LUCID's y, from y_t = v_t − Σ_{j<t} Φ_tj y_j."""
    kn = k / np.sqrt(np.mean(k * k, axis=-1, keepdims=True) + eps)
    y, d = np.zeros_like(v), k.shape[-1]
    for b, n in np.ndindex(k.shape[0], k.shape[2]):
        phi = np.exp((kn[b, :, n] @ kn[b, :, n].T - d) / np.sqrt(d))
        for t in range(len(phi)):
            y[b, t, n] = v[b, t, n] - phi[t, :t] @ y[b, :t, n]
    return y


def grouped(x, group):
    """(b, s, h, ·) as (b, s, n, group, ·)."""
    return x.reshape(*x.shape[:2], x.shape[2] // group, group, x.shape[-1])
