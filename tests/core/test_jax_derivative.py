"""A function with a derivative of its own keeps it in all of JAX's transformations."""

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precondattn.frameworks.jax.derivative import with_derivative


def tenfold(arguments):
    """sin x at index i, whose derivative is declared to be ten times the result itself."""

    def function(x, i):
        return {"of": jnp.sin(x["x"][i]), "i": i}

    def derivative(primals, tangents):
        (_, i), (d_x, _) = primals, tangents
        result = tenfold(primals)
        moved = 10.0 * result["of"] * d_x["x"][i]
        return result, {"of": moved, "i": np.zeros(i.shape, jax.dtypes.float0)}

    return with_derivative(function, derivative)(*arguments)


POINTS, PLACES = jnp.linspace(0.1, 0.7, 3), jnp.asarray([2, 0])


def at(x, i):
    return tenfold(({"x": x}, i))["of"]


def in_a_loop(x, i):
    def step(total, j):
        return total + at(x * (1.0 + 0.0 * total), j), None

    return lax.scan(step, 0.0 * x[0], i)[0]


def mapped(x, i):
    return jnp.sum(jax.vmap(at, in_axes=(None, 0))(x, i))


def of_mapped_loops(x, i):
    return jnp.sum(jax.vmap(in_a_loop, in_axes=(0, None))(jnp.stack([x, x]), i)) / 2


@pytest.mark.parametrize("function", [in_a_loop, mapped, of_mapped_loops])
def test_a_derivative_is_kept_in_loops_and_maps(function):
    chosen = np.asarray([1.0, 0.0, 1.0])
    np.testing.assert_allclose(
        jax.jit(function)(POINTS, PLACES), np.sum(chosen * np.sin(POINTS)), rtol=1e-6
    )
    gradient = jax.grad(function)
    np.testing.assert_allclose(gradient(POINTS, PLACES), 10.0 * chosen * np.sin(POINTS), rtol=1e-6)
    along = jax.jvp(lambda x: gradient(x, PLACES), (POINTS,), (POINTS,))[1]
    np.testing.assert_allclose(along, 100.0 * chosen * np.sin(POINTS) * POINTS, rtol=1e-6)
    again = jax.grad(lambda x: jnp.vdot(gradient(x, PLACES), POINTS))(POINTS)
    np.testing.assert_allclose(again, along, rtol=1e-6)
