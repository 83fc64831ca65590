"""Gradients that kernels compute can be differentiated again."""

import jax
import jax.numpy as jnp
import numpy as np

import precondattn as pa
from precondattn_conformance.inputs import Layout, make_inputs


def test_a_gradient_by_kernels_can_be_differentiated_in_reverse():
    m, layout = pa.GatedDelta(), Layout("small", b=1, t=5, s=5, h=2, n=1, d=16, e=16)
    made = make_inputs(m, layout, "random")
    x = {name: jnp.asarray(array, dtype=jnp.float32) for name, array in made.items()}
    assert m.explain(**x, verb="vjp", backend="pallas").backends == ("pallas",)

    def product(x, backend):
        def gradient(x):
            return jax.grad(lambda x: jnp.sum(m(**x, backend=backend) ** 2))(x)

        return jax.grad(lambda x: sum(jnp.sum(jnp.sin(g)) for g in gradient(x).values()))(x)

    result, expected = (jax.jit(product, static_argnums=1)(x, b) for b in ("pallas", "reference"))
    for name, array in expected.items():
        scale = float(jnp.max(jnp.abs(array)))
        np.testing.assert_allclose(result[name] / scale, array / scale, rtol=0, atol=2e-5)
