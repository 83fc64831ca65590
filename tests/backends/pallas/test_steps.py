"""Steps of LUCID by a Pallas kernel, interpreted, and derivatives of what kernels compute."""

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs
from tests.backends.kernel_problems import error, problem
from tests.backends.pallas.tiles import in_jax, quick, small_tiles, wide


def extended(mechanism, x, held, *, capacity, **masks):
    """A cache of the first tokens, and the other ones."""
    cache = mechanism.init_cache(**x, capacity=capacity, key_mask="key_mask" in masks)
    past, new = ({n: a[:, part] for n, a in x.items()} for part in (slice(held), slice(held, None)))
    return quick(lambda cache, past: mechanism.extend(cache, **past, **masks)[1])(cache, past), new


@pytest.mark.parametrize(
    ("expression", "sizes", "dtype", "bound"),
    [
        ("lucid[beta=true]", {"h": 4, "n": 2}, "bfloat16", 1e-2),
        ("lucid", {"h": 16, "d": 16, "e": 16}, "float32", 1e-5),
    ],
)
def test_decoding_after_a_cache(expression, sizes, dtype, bound):
    m = pa.parse(expression)
    x = in_jax(problem(m, 36, b=2, keys="clustered", **sizes)[0], dtype)
    expected = m(**{name: wide(a) for name, a in x.items()}, backend="reference")
    cache, new = extended(m, x, 34, capacity=48)
    step = quick(lambda cache, new: m.extend(cache, **new, backend="pallas"))
    for i in range(2):
        with small_tiles():
            out, cache = step(cache, {name: a[:, i : i + 1] for name, a in new.items()})
        assert error(out[:, 0], expected[:, 34 + i]) < bound


def arrays_of(m):
    layout = CallLayout("small", b=1, t=5, s=5, h=2, n=1, d=16, e=16)
    return in_jax(make_inputs(m, layout, "random"), jnp.float32)


def compare(result, expected):
    for one, other in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
        scale = max(float(jnp.max(jnp.abs(other))), 1e-3)
        np.testing.assert_allclose(one / scale, other / scale, rtol=0, atol=2e-5)


def along(tree):
    return jax.tree.map(
        lambda a: jnp.cos(1.0 + jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), tree
    )


def every_order(gradient, x):
    """The gradient, and Hessian-vector products, forward over reverse and reverse over reverse."""

    def projected(x):
        products = jax.tree.map(lambda g, d: jnp.sum(g * d), gradient(x), along(x))
        return sum(jax.tree.leaves(products))

    return gradient(x), jax.jvp(gradient, (x,), (along(x),))[1], jax.grad(projected)(x)


@pytest.mark.thorough(but=("lucid",))
@pytest.mark.parametrize("expression", ["gated_delta", "lucid"])
def test_an_extension_by_kernels_can_be_differentiated_twice(expression):
    m = pa.parse(expression)
    cache, new = extended(m, arrays_of(m), 4, capacity=8)
    assert set(m.explain(**new, cache=cache, backend="pallas").backends) == {"pallas"}

    def products(backend):
        def loss(x):
            store, new = x
            out, after = m.extend(cache._replace(store=store), **new, backend=backend)
            return jnp.sum(out**2) + sum(jnp.sum(b**3) for b in after.store.values())

        return quick(lambda x: every_order(jax.grad(loss), x))((cache.store, new))

    with small_tiles():
        result = products("pallas")
    compare(result, products("reference"))


def test_queries_in_float16_are_not_rounded_by_the_scale():
    """q k is 2⁻¹⁰, a sum of terms of size 1, and d^{-1/2} q is not a float16."""
    q = np.array([1.0, 1.0 + 2.0**-10, -2.0], np.float16).reshape(1, 1, 1, 3)
    k, v = np.ones_like(q), np.ones((1, 1, 1, 2), np.float16)
    m, cotangent = pa.Linear(), np.array([3.0, -1.0], np.float16).reshape(1, 1, 1, 2)
    out, pullback = m.vjp(*map(jnp.asarray, (q, k, v)), backend="pallas")
    exact, exact_pullback = m.vjp(*map(wide, (q, k, v)), backend="reference")
    np.testing.assert_allclose(wide(out), exact, rtol=1e-3)
    found = pullback(jnp.asarray(cotangent))  # dv = s (q k) do as well.
    for name, expected in exact_pullback(wide(cotangent)).items():
        np.testing.assert_allclose(wide(found[name]), expected, rtol=1e-3)


@pytest.mark.thorough
def test_small_cotangents_of_lucid_in_float16_beside_large_ones():
    """dv of a token depends on its own cotangent and on later ones, which are small here."""
    m = pa.LucidSolve()
    inputs = make_inputs(m, CallLayout("range", t=12, s=12, d=8, e=4), "random")
    x = {name: array.astype(np.float16) for name, array in inputs.items()}
    cotangent = np.random.default_rng(0).normal(size=x["v"].shape).astype(np.float16)
    cotangent[:, :3] *= np.float16(4000)
    cotangent[:, 3:] *= np.float16(0.002)
    _, pullback = m.vjp(**in_jax(x), backend="pallas")
    _, exact = m.vjp(**{n: wide(a) for n, a in x.items()}, backend="reference")
    found = wide(pullback(jnp.asarray(cotangent))["v"])[:, 3:]
    expected = exact(wide(cotangent))["v"][:, 3:]
    assert np.abs(found - expected).max() < 5e-3 * np.abs(expected).max()
