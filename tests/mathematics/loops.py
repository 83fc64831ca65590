"""Attention written as loops: scores, masks, reads, and LUCID's solve."""

import numpy as np


def visible_keys(b, t, s, *, window=None, lengths=None, key_mask=None, segment_ids=None):
    """(b, 1, t, s). Query i has position i + s − t; padding neither attends nor is attended to."""
    distance = np.arange(t)[:, None] + s - t - np.arange(s)
    visible = np.broadcast_to(distance >= 0, (b, 1, t, s)).copy()
    if window is not None:
        visible &= distance < window
    if lengths is not None:
        real = np.arange(s) < np.asarray(lengths)[:, None]
        visible &= real[:, None, None, :] & real[:, None, s - t :, None]
    if key_mask is not None:
        visible &= key_mask[:, None, None, :]
    if segment_ids is not None:
        ids = segment_ids
        visible &= ids[:, None, None, :] == ids[:, None, s - t :, None]
    return visible


def dot_scores(q, k):
    return np.einsum("bthd,bshd->bhts", q, np.repeat(k, q.shape[2] // k.shape[2], axis=2))


def path_scores(q, k, w, beta):
    """q_iᵀ H_i … H_{j+1} k_j with H_t = I − β_t w_t w_tᵀ, one reflection after another."""
    (b, t, h, _), (s, n) = q.shape, k.shape[1:3]
    scores = np.zeros((b, h, t, s))
    for batch, head, i in np.ndindex(b, h, t):
        moving, shared = q[batch, i, head].copy(), head * n // h
        for j in range(i + s - t, -1, -1):
            scores[batch, head, i, j] = moving @ k[batch, j, shared]
            direction = w[batch, j, shared]
            moving -= beta[batch, j, shared] * (moving @ direction) * direction
    return scores


def read(scores, visible, v, log_of_mean=False):
    """A v, or log(A eᵛ), over the visible keys; rows without a visible key give 0."""
    v = np.repeat(v, scores.shape[1] // v.shape[2], axis=2).transpose(0, 2, 1, 3)
    v = np.where(np.any(visible, axis=(1, 2))[:, None, :, None], v, 0)  # Padding may be NaN.
    blind = ~np.any(visible, axis=-1, keepdims=True)
    visible = visible | blind
    scores = np.where(visible, scores, -np.inf)
    logs = scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True)
    if log_of_mean:
        out = np.logaddexp.reduce(logs[..., None] + v[:, :, None], axis=-2)
    else:
        out = np.exp(logs) @ v
    return np.where(blind, 0, out).transpose(0, 2, 1, 3)


def read_causal(scores, v, window=None, log_of_mean=False):
    """The read of values under a causal mask."""
    visible = visible_keys(1, *scores.shape[-2:], window=window)
    return read(scores, visible, v, log_of_mean)


def solved_values(k, v, normalize="keys", eps=1e-6):
    """LUCID's y, from E y = v, row by row."""
    d, y = k.shape[-1], np.zeros_like(v)
    kn = k / np.sqrt(np.mean(k * k, axis=-1, keepdims=True) + eps) if normalize == "keys" else k
    for b, n in np.ndindex(k.shape[0], k.shape[2]):
        scores = kn[b, :, n] @ kn[b, :, n].T / np.sqrt(d)
        for t in range(len(scores)):
            shift = {"keys": np.sqrt(d), "none": 0.0, "rows": scores[t, : t + 1].max()}[normalize]
            row = np.exp(scores[t, : t + 1] - shift)
            row[t] = 1.0 if normalize == "keys" else row[t]
            y[b, t, n] = (v[b, t, n] - row[:t] @ y[b, :t, n]) / row[t]
    return y
