"""Second derivatives on the backend `jax` are those of the reference, in linear memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.declared import derived, expressions
from precondattn_conformance.inputs import CallLayout, make_inputs

LAYOUT = CallLayout("several blocks", b=2, t=13, s=13, h=2, n=1, d=4, e=4)
EACH_KIND = {
    "lucid": "tiles and a triangular solve, as of deltaformer",
    "path": "transported scores",
    "symmetric_lucid_solve": "a symmetric solve",
    "gated_delta": "a recurrence in chunks",
    "mesa": "a solve in a loop that has a rule of its own",
}
"""An expression for each way in which derivatives are computed."""

DECLARED = sorted({*expressions()} - derived())
"""Every mechanism and its variants. Compositions without a class have no code of their own."""


def arrays_of(m, layout=LAYOUT):
    return {name: jnp.asarray(a) for name, a in make_inputs(m, layout, "random").items()}


def directions(x):
    return {name: jnp.cos(1.0 + jnp.arange(a.size)).reshape(a.shape) for name, a in x.items()}


def forward_over_reverse(loss, x, direction):
    return jax.jvp(jax.grad(loss), (x,), (direction,))[1]


def reverse_over_reverse(loss, x, direction):
    def along(x):
        return sum(jnp.sum(g * direction[name]) for name, g in jax.grad(loss)(x).items())

    return jax.grad(along)(x)


BOTH = (forward_over_reverse, reverse_over_reverse)


def compare(call, x, modes=BOTH):
    """Hessian-vector products of a loss that is quadratic in the output of call(x, backend)."""

    def product(mode, backend):
        return jax.jit(lambda x, d: mode(lambda x: jnp.sum(call(x, backend) ** 2), x, d))

    expected = product(forward_over_reverse, "reference")(x, directions(x))
    for mode in modes:
        result = product(mode, "jax")(x, directions(x))
        for name, array in expected.items():
            scale = max(float(jnp.max(jnp.abs(array))), 1e-3)
            np.testing.assert_allclose(result[name] / scale, array / scale, rtol=0, atol=1e-9)


def with_lengths(m, x, backend):
    return m(**x, lengths=jnp.asarray([9, 13]), backend=backend)


def in_two_steps(m, x, backend):
    cache, outs = m.init_cache(**x, capacity=14), []
    for part in (slice(0, 8), slice(8, 13)):
        out, cache = m.extend(cache, **{n: a[:, part] for n, a in x.items()}, backend=backend)
        outs.append(out)
    return jnp.concatenate(outs, axis=1)


# One order of modes: a reverse pass over the gradient is the transpose of a forward one.
@pytest.mark.thorough
@pytest.mark.parametrize("expression", EACH_KIND)
def test_a_gradient_can_be_differentiated_in_reverse(expression, small_blocks):
    m = pa.parse(expression)
    compare(partial(with_lengths, m), arrays_of(m), [reverse_over_reverse])


@pytest.mark.slow
@pytest.mark.parametrize("expression", DECLARED)
def test_second_derivatives_of_every_mechanism(expression, small_blocks):
    m = pa.parse(expression)
    compare(partial(with_lengths, m), arrays_of(m))


def test_a_gradient_can_be_differentiated_forward(small_blocks):
    m = pa.parse("gated_delta")
    compare(partial(with_lengths, m), arrays_of(m), [forward_over_reverse])


@pytest.mark.thorough
@pytest.mark.parametrize("expression", ["softmax", pytest.param("gla", marks=pytest.mark.slow)])
def test_second_derivatives_go_through_caches(expression, small_blocks):
    m = pa.parse(expression)
    compare(partial(in_two_steps, m), arrays_of(m))
