"""Mesa's solve in JAX is differentiated as a solve, not through its loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs

M = pa.parse("mesa[beta=true]")


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def problem():
    x = make_inputs(M, CallLayout("test", t=9, s=9), "clustered")
    return {name: jnp.asarray(array) for name, array in x.items()}


def extended(store, x, cache):
    out, cache = M.extend(cache._replace(store=store), **x)
    return out, cache.store


@pytest.mark.thorough
def test_an_extension_is_differentiated_in_inputs_and_states():
    x = problem()
    _, cache = M.extend(M.init_cache(**x), **x)
    (out, last), pull = jax.vjp(lambda store, x: extended(store, x, cache), cache.store, x)
    d_out = jnp.linspace(-1, 1, out.size).reshape(out.shape)
    d_last = {name: jnp.cos(array) for name, array in last.items()}
    d_store, d_x = pull((d_out, d_last))
    _, _, pullback = M.extend_vjp(cache, **x)
    expected_x, expected_store = pullback(d_out, d_last)
    for found, expected in ((d_x, expected_x), (d_store, expected_store)):
        for name, gradient in found.items():
            np.testing.assert_allclose(gradient, expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.thorough
def test_forward_mode_through_an_extension():
    x = problem()
    cache = M.init_cache(**x)
    tangent = {name: jnp.sin(7 * array) for name, array in x.items()}
    _, found = jax.jvp(lambda x: extended(cache.store, x, cache)[0], (x,), (tangent,))
    step = 1e-6
    ahead, behind = (
        extended(cache.store, {n: a + s * step * tangent[n] for n, a in x.items()}, cache)[0]
        for s in (1, -1)
    )
    np.testing.assert_allclose(found, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-7)
