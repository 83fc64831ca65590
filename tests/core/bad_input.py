"""Inputs of calls that are refused, the verbs that refuse them, and how an error is compared."""

import re

import numpy as np
import pytest

import precondattn as pa

SOFTMAX, LUCID, BIASED = pa.Softmax(), pa.Lucid(), pa.Softmax(bias=True)
FREE = pa.Softmax(causal=False)
Q, K, V = np.random.default_rng(0).normal(size=(3, 2, 4, 2, 3))
for _array in (Q, K, V):
    _array.flags.writeable = False
ARRAY = "must be an array of NumPy, PyTorch, JAX, CuPy or another array-API library; found"
ONE_DTYPE = (
    "softmax: inputs of one dtype expected (beside half-precision queries, keys and "
    "values, gates and the like may be float32); found "
)


def refuses(run, error, text):
    with pytest.raises(error, match=re.escape(text)) as caught:
        run()
    assert isinstance(caught.value, TypeError | ValueError)


def f32(array):
    return array.astype(np.float32)


def cache_for(mechanism=SOFTMAX, capacity=8, **named):
    return mechanism.init_cache(Q, K, V, capacity=capacity, **named)


FULL = (
    lambda m, *arrays, **named: m(*arrays, **named),
    lambda m, *arrays, **named: m.vjp(*arrays, **named),
    lambda m, *arrays, **named: m.explain(*arrays, **named),
)
EXTENDING = (
    lambda m, *arrays, **named: m.extend(cache_for(m), *arrays, **named),
    lambda m, *arrays, **named: m.explain(*arrays, cache=cache_for(m), **named),
)
