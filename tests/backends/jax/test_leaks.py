"""`jax.checking_leaks` finds nothing of ours, so that users can look for leaks of their own."""

import gc

import jax
import jax.numpy as jnp
import pytest

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs


@pytest.fixture
def few_objects():
    """A context in which existing objects are not searched by JAX's garbage collections."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.thorough
@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("expression", ["lucid", "gated_delta"])
def test_no_tracer_outlives_its_trace(expression):
    m = pa.parse(expression)
    x = make_inputs(m, CallLayout("small", b=2, t=4, s=4, h=2, n=2, d=4, e=4), "clustered")
    x = {name: jnp.asarray(array) for name, array in x.items()}
    cache, lengths = m.init_cache(**x, capacity=4), jnp.asarray([2, 4])

    def gradient(x):
        return jax.grad(lambda x: m(**x, lengths=lengths).sum())(x)

    jax.clear_caches()  # A function that is already traced is not traced again.
    with jax.checking_leaks():
        jax.jit(lambda x: m(**x)).trace(x)
        jax.jit(gradient).trace(x)
        jax.jit(jax.vmap(gradient)).trace({name: array[None] for name, array in x.items()})
        jax.jit(lambda cache, x: m.extend(cache, **x)).trace(cache, x)
