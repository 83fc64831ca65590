"""The blocked delta rules erase with another key than they write with, as the definition does.

It is read in the decayed state (`erase`) or before the decay (`undecayed`). Keys repeat, and one is
0; gates are open, closed or in between.
"""

import numpy as np
import pytest

from precondattn.spec.recurrence import Stream, recurrent, recurrent_vjp
from precondattn_portable.arithmetic import arithmetic_of
from precondattn_portable.chunkwise import Chunkwise
from precondattn_portable.few_tokens import FewTokens
from precondattn_portable.one_token import OneToken


def stream(s, gate, t=None, erased="erase", b=2, m=2, r=2, d=4, e=3):
    """A random stream with erase keys, and its initial state."""
    rng = np.random.default_rng(s)
    k = rng.normal(size=(b, m, 3, d))[:, :, rng.integers(3, size=s)]
    k /= np.linalg.vector_norm(k, axis=-1, keepdims=True)
    if s > 1:
        k[:, :, -1] = 0  # A single key of 0 would write nothing, whatever is erased.
    erase = k + 0.3 * rng.normal(size=k.shape)
    channels = d if gate == "key" else 1
    g = rng.choice([0.0, -1e-3, -1.0, -50.0], size=(b, m, s, channels, 1)) * (gate != "none")
    q, v = rng.normal(size=(b, m, t or s, r, d)), rng.normal(size=(b, m, s, e))
    beta = rng.choice([0.0, 0.3, 1.0], size=(b, m, s))
    return Stream(q, k, v, g, beta, **{erased: erase}), rng.normal(size=(b, m, d, e))


def of_portable(x, state):
    return Chunkwise(arithmetic_of("numpy")), x, state


def of_jax(x, state):
    jax = pytest.importorskip("jax")
    from precondattn_jax.chunkwise import Chunkwise as JaxChunkwise

    return (
        JaxChunkwise(),
        Stream(*(None if a is None else jax.numpy.asarray(a) for a in x)),
        jax.numpy.asarray(state),
    )


def assert_close(result, expected, bound):
    result = np.asarray(result)
    assert result.shape == expected.shape
    assert np.abs(result - expected).max() <= bound * (1 + np.abs(expected).max())


@pytest.mark.thorough(
    but=("undecayed-150-150-none-of_jax-1e-05", "undecayed-150-150-head-of_jax-1e-05")
)
@pytest.mark.parametrize(("make", "bound"), [(of_portable, 1e-12), (of_jax, 1e-5)])
@pytest.mark.parametrize("gate", ["head", "key", "none"])
@pytest.mark.parametrize(("s", "t"), [(65, 3), (150, 150)])
@pytest.mark.parametrize("erased", ["erase", "undecayed"])
def test_chunks_are_those_of_the_definition(erased, gate, s, t, make, bound):
    x, state = stream(s, gate, t, erased)
    form, given, first = make(x, state)
    expected, expected_last = recurrent(x, state)
    out, last = form.forward(given, first)
    assert_close(out, expected, bound)
    assert_close(last, expected_last, bound)

    rng = np.random.default_rng(0)
    d_o, d_last = rng.normal(size=expected.shape), rng.normal(size=state.shape)
    expected = recurrent_vjp(x, state, d_o, d_last)
    result = form.vjp(given, first, d_o, d_last)
    assert_close(result.state, expected.state, bound)
    for name in Stream._fields:
        if getattr(x, name) is None:
            assert getattr(result.stream, name) is getattr(expected.stream, name) is None
            continue
        assert_close(getattr(result.stream, name), getattr(expected.stream, name), bound)


@pytest.mark.parametrize("gate", ["head", "key"])
@pytest.mark.parametrize("erased", ["erase", "undecayed"])
def test_one_token_and_few_tokens_are_those_of_the_definition(erased, gate):
    x, state = stream(1, gate, erased=erased)
    result = OneToken(arithmetic_of("numpy"), decays=True).forward(x, state)
    for one, other in zip(result, recurrent(x, state), strict=True):
        assert_close(one, other, 1e-12)
    x, state = stream(9, gate, 4, erased)
    out, _ = FewTokens(arithmetic_of("numpy"), decays=True).forward(x, state)
    assert_close(out, recurrent(x, 0 * state)[0], 1e-12)
