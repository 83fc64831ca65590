"""Inputs that several experiments share."""

import numpy as np
from drawing import clustered

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs


def real(*names):
    """Inputs (1, 252, 9, 32) of a small language model, trained on English: a fixture."""
    layout = CallLayout("real", b=1, t=252, s=252, h=9, n=9, d=32, e=32)
    inputs = make_inputs(pa.Softmax(), layout, "real")
    return [np.asarray(inputs[name], np.float64) for name in names]


def keys(kind, tokens):
    """Keys (tokens, 32) of length 1."""
    if kind == "of a trained model":
        k = real("k")[0][0, -tokens:, 0]
    elif kind == "clustered":
        k = clustered(tokens, 32, 8, 0.1)[0, :, 0]
    else:
        k = np.random.default_rng(0).normal(size=(tokens, 32))
    return k / np.linalg.norm(k, axis=-1, keepdims=True)


def drawn(kind, tokens, width, seed):
    """Arguments of attention: normal q, k and v with one change."""
    q, k, v = np.random.default_rng(seed).normal(size=(3, 1, tokens, 1, width))
    if kind == "values with a mean":
        v = v + 1
    elif kind == "clustered values":
        v = v[:, np.arange(tokens) % 4] + 0.01 * v
    elif kind == "near-singular":
        v[..., 0] = v[..., 1] + 1e-3 * v[..., 0]
    return {"q": 4 * q if kind == "sharp" else q, "k": k, "v": v, "causal": kind == "causal"}


def counter_example(tokens, size):
    """Arguments of attention: a token attends to itself, the others to one another; κ(A) is 1."""
    one = np.repeat([[1.0, 0.0], [0.0, 1.0]], [1, tokens - 1], axis=0).reshape(1, tokens, 1, 2)
    v = one * [np.sqrt(tokens - 1), 1]
    return {"q": size * one, "k": size * one, "v": v, "causal": False, "scale": 1.0}
