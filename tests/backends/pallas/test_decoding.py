"""A step of LUCID by a Pallas kernel, interpreted, against the definition's full call and step."""

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

import precondattn as pa
from tests.backends.pallas.tiles import error, quick, rounded, small_tiles


def arrays(t, h, n, d, e, beta=False):
    rng = np.random.default_rng(0)
    k = 0.3 * rng.normal(size=(2, t, n, d))
    x = {"q": rng.normal(size=(2, t, h, d)), "k": k + rng.normal(size=(2, 1, n, d))}
    x["v"] = rng.normal(size=(2, t, n, e))
    if beta:
        x["lucid_beta"] = 2 * rng.uniform(size=(2, t, n))
    return x


@pytest.mark.parametrize(
    ("h", "n", "d", "e", "options", "dtype", "bound"),
    [(4, 2, 12, 20, {"beta": True}, "bfloat16", 1e-2), (16, 1, 16, 16, {}, "float32", 1e-5)],
)
def test_decoding_after_a_cache(h, n, d, e, options, dtype, bound):
    m, t, first = pa.Lucid(**options), 36, 34
    given = {name: rounded(a, dtype) for name, a in arrays(t, h, n, d, e, **options).items()}
    x = {name: pair[0] for name, pair in given.items()}
    expected = m(**{name: pair[1] for name, pair in given.items()}, backend="reference")
    cache = m.init_cache(**x, capacity=48)
    prefill = quick(lambda cache, past: m.extend(cache, **past)[1])
    cache = prefill(cache, {name: a[:, :first] for name, a in x.items()})
    step = quick(lambda cache, new: m.extend(cache, **new, backend="pallas"))
    for i in range(first, t):
        with small_tiles():
            out, cache = step(cache, {name: a[:, i : i + 1] for name, a in x.items()})
        assert error(out[:, 0], expected[:, i]) < bound


@pytest.mark.thorough
def test_decoding_sequences_of_unequal_lengths():
    """One sequence begins with the step, one has no new token, and some keys are masked."""
    m = pa.Lucid()
    x = {name: jnp.concatenate([a, a[:1]], 0) for name, a in arrays(21, 2, 2, 8, 8).items()}
    x = {name: a.astype(jnp.float32) for name, a in x.items()}
    cache = m.init_cache(**x, capacity=24, key_mask=True)
    mask = jnp.asarray(np.arange(20) % 5 != 2)[None] & jnp.ones((3, 1), bool)
    past = {name: a[:, :20] for name, a in x.items()}
    given = {"lengths": jnp.asarray([20, 0, 7]), "key_mask": mask}
    cache = quick(lambda cache, past: m.extend(cache, **past, **given)[1])(cache, past)
    new = {name: a[:, 20:] for name, a in x.items()} | {"lengths": jnp.asarray([1, 1, 0])}

    def step(backend):
        return quick(lambda cache, new: m.extend(cache, **new, backend=backend))(cache, new)

    expected, other = step("reference")
    with small_tiles():
        result, cache = step("pallas")
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    for name, buffer in other.store.items():
        np.testing.assert_allclose(cache.store[name], buffer, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_the_gradient_of_a_step_is_that_of_the_definitions():
    m, x = pa.Lucid(), arrays(6, 4, 2, 8, 8)
    x = {name: a.astype(np.float32) for name, a in x.items()}
    cache = m.init_cache(**{name: jnp.asarray(a) for name, a in x.items()}, capacity=8)
    past, new = (
        {n: jnp.asarray(a[:, part]) for n, a in x.items()} for part in (slice(5), slice(5, 6))
    )
    cache = quick(lambda cache, past: m.extend(cache, **past)[1])(cache, past)

    def gradient(backend):
        def loss(store, new):
            out, after = m.extend(cache._replace(store=store), **new, backend=backend)
            return jnp.sum(out**2) + sum(jnp.sum(b**3) for b in after.store.values())

        return quick(jax.grad(loss, (0, 1)))(cache.store, new)

    with small_tiles():
        result = gradient("pallas")
    for one, other in zip(*map(jax.tree.leaves, (result, gradient("reference"))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
