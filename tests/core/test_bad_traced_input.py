"""Invalid lengths and segments in traced arrays can not raise: their sequences become NaN."""

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs

KINDS = {
    "lengths above": ["lucid", "path[flush=3]"],
    "lengths below": ["softmax"],
    "lengths huge": ["softmax"],
    "torn segments": ["lucid", "laser"],
    "capacity": ["lucid", "softmax"],
    "new lengths above": ["laser", "path[flush=3]"],
}
"""What is invalid, and mechanisms; masks are checked before any of them runs."""


def assert_only_sequence_one_is_nan(out, expected):
    assert np.isnan(out[1]).all(), "sequence 1 has plausible values"
    for i in (0, 2):
        np.testing.assert_allclose(out[i], expected[i], rtol=1e-12, atol=1e-12)


def traced_inputs(mechanism):
    layout = CallLayout("traced", b=3, t=4, s=4, h=2, n=2, d=3, e=3)
    return {n: jnp.asarray(a) for n, a in make_inputs(mechanism, layout, "random").items()}


def traced_outputs(mechanism, kind):
    """Outputs of a jitted call with masks that are invalid in sequence 1, and with valid ones."""
    x = traced_inputs(mechanism)
    if kind.startswith("lengths"):
        run = jax.jit(lambda lengths: mechanism(**x, lengths=lengths))
        bad = {"lengths above": 5, "lengths below": -1, "lengths huge": 2**32 + 2}[kind]
        return tuple(run(jnp.asarray([2, n, 4])) for n in (bad, 3))
    if kind == "torn segments":
        run = jax.jit(lambda ids: mechanism(**x, segment_ids=ids))
        ids = jnp.asarray([[0, 0, 1, 1], [0, 1, 0, 0], [3, 3, 3, 3]])
        return run(ids), run(ids.at[1].set(0))
    if kind == "capacity":
        run = jax.jit(lambda cache: mechanism.extend(cache, **x)[0])
        cache = mechanism.init_cache(**x, capacity=6)
        _, bad = mechanism.extend(cache, **x, lengths=[1, 3, 2])
        _, good = mechanism.extend(cache, **x, lengths=[1, 2, 2])
        return run(bad), run(good)
    run = jax.jit(lambda cache, n: mechanism.extend(cache, **x, lengths=n)[0])
    cache = mechanism.init_cache(**x, capacity=8)
    return tuple(run(cache, jnp.asarray([2, n, 4])) for n in (5, 3))


@pytest.mark.parametrize(
    ("text", "kind"), [(text, kind) for kind, texts in KINDS.items() for text in texts]
)
def test_invalid_traced_masks_give_nan_for_their_sequence_only(text, kind):
    out, expected = traced_outputs(pa.parse(text), kind)
    assert not np.isnan(expected).any()
    assert_only_sequence_one_is_nan(out, expected)


@pytest.mark.parametrize(
    ("text", "count"),
    [("softmax[window=2]", 5), ("lucid(laser)", -1), ("lucid(path)", 5), ("path[flush=3]", -1)],
)
def test_a_sequence_with_invalid_traced_lengths_stays_nan_when_its_cache_is_extended(text, count):
    mechanism = pa.parse(text)
    x = traced_inputs(mechanism)
    run = jax.jit(lambda cache, n: mechanism.extend(cache, **x, lengths=n))
    cache = mechanism.init_cache(**x, capacity=32)
    _, invalid = run(cache, jnp.asarray([2, count, 4]))
    _, valid = run(cache, jnp.asarray([2, 3, 4]))
    whole = jnp.asarray([4, 4, 4])
    assert_only_sequence_one_is_nan(run(invalid, whole)[0], run(valid, whole)[0])


def test_gradients_of_a_sequence_with_invalid_traced_lengths_are_nan():
    q = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 2, 4)))
    gradient = jax.jit(jax.grad(lambda v, n: pa.softmax(q, q, v, lengths=n).sum()))
    found = np.asarray(gradient(q, jnp.asarray([9, 3])))
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()
