"""Gradients that kernels compute can be differentiated again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs
from tests.backends.pallas.tiles import quick, small_tiles


def arrays_of(m):
    layout = CallLayout("small", b=1, t=5, s=5, h=2, n=1, d=16, e=16)
    made = make_inputs(m, layout, "random")
    return {name: jnp.asarray(array, dtype=jnp.float32) for name, array in made.items()}


def compare(result, expected):
    for one, other in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
        scale = max(float(jnp.max(jnp.abs(other))), 1e-3)
        np.testing.assert_allclose(one / scale, other / scale, rtol=0, atol=2e-5)


@pytest.mark.thorough
def test_a_gradient_by_kernels_can_be_differentiated_in_reverse():
    m = pa.GatedDelta()
    x = arrays_of(m)
    assert m.explain(**x, verb="vjp", backend="pallas").backends == ("pallas",)

    def product(x, backend):
        def gradient(x):
            return jax.grad(lambda x: jnp.sum(m(**x, backend=backend) ** 2))(x)

        return jax.grad(lambda x: sum(jnp.sum(jnp.sin(g)) for g in gradient(x).values()))(x)

    result, expected = (jax.jit(product, static_argnums=1)(x, b) for b in ("pallas", "reference"))
    compare(result, expected)


@pytest.fixture(params=["gated_delta", "lucid"])
def extended(request):
    """A mechanism, a cache of four tokens, and the next one."""
    m = pa.parse(request.param)
    x = arrays_of(m)
    cache = m.init_cache(**x, capacity=8)
    past, new = ({n: a[:, part] for n, a in x.items()} for part in (slice(4), slice(4, 5)))
    cache = jax.jit(lambda cache, past: m.extend(cache, **past)[1])(cache, past)
    assert set(m.explain(**new, cache=cache, backend="pallas").backends) == {"pallas"}
    return m, cache, new


def along(tree):
    return jax.tree.map(
        lambda a: jnp.cos(1.0 + jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), tree
    )


def both_orders(gradient, x):
    """Hessian-vector products, forward over reverse and reverse over reverse."""

    def projected(x):
        products = jax.tree.map(lambda g, d: jnp.sum(g * d), gradient(x), along(x))
        return sum(jax.tree.leaves(products))

    return jax.jvp(gradient, (x,), (along(x),))[1], jax.grad(projected)(x)


def test_an_extension_by_kernels_can_be_differentiated_twice(extended):
    m, cache, new = extended

    def products(backend):
        def loss(x):
            store, new = x
            out, after = m.extend(cache._replace(store=store), **new, backend=backend)
            return jnp.sum(out**2) + sum(jnp.sum(b**3) for b in after.store.values())

        return quick(lambda x: both_orders(jax.grad(loss), x))((cache.store, new))

    with small_tiles():
        result = products("pallas")
    compare(result, products("reference"))


def test_the_pullback_of_an_extension_by_kernels_can_be_differentiated():
    m = pa.GatedDelta()
    new = {name: array[:, :1] for name, array in arrays_of(m).items()}
    cache = m.init_cache(**new)
    states = along(cache.store)

    def products(backend):
        def gradient(x):
            store, new = x
            extended = m.extend_vjp(cache._replace(store=store), **new, backend=backend)
            out, after, pullback = extended
            return tuple(reversed(pullback(out, after)))

        return quick(lambda x: both_orders(gradient, x))((states, new))

    compare(products("pallas"), products("reference"))
