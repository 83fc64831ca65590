"""PaTH's step in JAX against the definition's: outputs and buffers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs

NEW = np.asarray([[5, 3, 0], [1, 1, 1], [1, 0, 4], [7, 7, 2], [1, 1, 1], [2, 3, 8]])
"""The numbers of new tokens of three sequences, step by step."""

CAPACITY, MOST = 19, 8


def inputs(m, rng):
    """New tokens for each sequence, some of which are padding."""
    x = make_inputs(m, CallLayout("step", b=3, t=MOST, s=MOST, h=4, n=2, d=6, e=5), "clustered")
    x = {name: rng.permuted(a, axis=1) for name, a in x.items()}
    if "bias" in x:
        x["bias"] = rng.normal(size=(3, 4, MOST, CAPACITY))
    return {name: jnp.asarray(a) for name, a in x.items()}


def agree(result, expected):
    np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.thorough(but=("path[flush=3,forget=scaled,bias=true]",))
@pytest.mark.parametrize(
    "expression",
    [
        "path[flush=16]",
        "path[flush=4,window=5]",
        "path[flush=3,forget=scaled,bias=true]",
        "laser(path[flush=3])",
    ],
)
def test_sequences_of_several_lengths_step_by_step(expression, small_blocks):
    """Outputs and buffers with traced lengths; some keys are always masked."""
    m, rng = pa.parse(expression), np.random.default_rng(0)
    cache = m.init_cache(**inputs(m, rng), capacity=CAPACITY, key_mask=True)
    caches = dict.fromkeys(("jax", "reference"), cache)
    steps = {name: jax.jit(partial(m.extend, backend=name)) for name in caches}
    for count in NEW:
        x, shown = inputs(m, rng), jnp.asarray(rng.random((3, MOST)) > 0.3)
        outs = {}
        for name, step in steps.items():
            outs[name], caches[name] = step(
                caches[name], **x, lengths=jnp.asarray(count), key_mask=shown
            )
        agree(outs["jax"], outs["reference"])
        for name, buffer in caches["jax"].store.items():
            agree(buffer, caches["reference"].store[name])


def test_a_step_does_not_call_lapack():
    """Two such calls at once deadlock on a machine with two cores."""
    m = pa.Path()
    x = {n: jnp.asarray(a) for n, a in make_inputs(m, CallLayout("s"), "random").items()}
    cache = m.init_cache(**x, capacity=32)

    def text(name):
        return jax.jit(partial(m.extend, backend=name)).lower(cache, **x).as_text()

    assert "lapack" in text("reference")
    assert "lapack" not in text("jax")
