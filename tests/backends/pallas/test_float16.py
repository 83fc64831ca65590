"""float16 on Pallas kernels: small results beside large ones keep their digits."""

import jax.numpy as jnp
import numpy as np

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs


def test_queries_are_not_rounded_by_the_scale():
    """q k is 2⁻¹⁰, a sum of terms of size 1, and d^{-1/2} q is not a float16."""
    q = np.array([1.0, 1.0 + 2.0**-10, -2.0], np.float16).reshape(1, 1, 1, 3)
    k, v = np.ones_like(q), np.ones((1, 1, 1, 2), np.float16)
    m = pa.Linear()
    out, pullback = m.vjp(*map(jnp.asarray, (q, k, v)), backend="pallas")
    exact, exact_pullback = m.vjp(*(a.astype(np.float64) for a in (q, k, v)), backend="reference")
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=1e-3)
    # dv = s (q k) do as well.
    cotangent = np.array([3.0, -1.0], np.float16).reshape(out.shape)
    found = pullback(jnp.asarray(cotangent))
    for name, expected in exact_pullback(cotangent.astype(np.float64)).items():
        np.testing.assert_allclose(np.asarray(found[name], np.float64), expected, rtol=1e-3)


def test_small_cotangents_of_lucid_beside_large_ones():
    """dv of a token depends on its own cotangent and on later ones, which are small here."""
    m = pa.LucidSolve()
    inputs = make_inputs(m, CallLayout("range", t=12, s=12, d=8, e=4), "random")
    x = {name: array.astype(np.float16) for name, array in inputs.items()}
    cotangent = np.random.default_rng(0).normal(size=x["v"].shape).astype(np.float16)
    cotangent[:, :3] *= np.float16(4000)
    cotangent[:, 3:] *= np.float16(0.002)
    _, pullback = m.vjp(**{name: jnp.asarray(a) for name, a in x.items()}, backend="pallas")
    _, exact = m.vjp(**{n: a.astype(np.float64) for n, a in x.items()}, backend="reference")
    found = np.asarray(pullback(jnp.asarray(cotangent))["v"], np.float64)[:, 3:]
    expected = exact(cotangent.astype(np.float64))["v"][:, 3:]
    assert np.abs(found - expected).max() < 5e-3 * np.abs(expected).max()
