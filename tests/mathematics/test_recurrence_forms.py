"""Three independent implementations of one recurrence, compared with one another.

Token by token (the oracle), all pairs at once, and in chunks with a state between them. An equality
has to hold to 1e-10 of the largest number in float64, and to 2e-5 in float32.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precondattn.spec.recurrence import Stream, recurrent, recurrent_vjp
from tests.mathematics.chunkwise_form import chunkwise
from tests.mathematics.identities import assert_close
from tests.mathematics.parallel_form import parallel

GATES = ["none", "head", "key", "value"]
RULES = {
    "sum": {},
    "delta": {"is_delta": True},
    "erase": {"is_delta": True, "erases": "erase"},
    "undecayed": {"is_delta": True, "erases": "undecayed"},
}


def stream(
    rng, gate, *, is_delta=False, erases=None, t=13, s=13, b=2, m=2, r=2, d=4, e=3, weakest=0.0
):
    """A random stream with some equal keys, and its initial state."""
    few = rng.normal(size=(b, m, 3, d))
    k = few[:, :, rng.integers(3, size=s)] + 0.1 * rng.normal(size=(b, m, s, d))
    k /= np.linalg.vector_norm(k, axis=-1, keepdims=True)
    shape = {"none": (1, 1), "head": (1, 1), "key": (d, 1), "value": (1, e)}[gate]
    g = weakest - np.exp(rng.normal(size=(b, m, s, *shape)))
    q, v = rng.normal(size=(b, m, t, r, d)), rng.normal(size=(b, m, s, e))
    beta = rng.choice([0.0, 0.3, 1.0, 2.0], size=(b, m, s)) if is_delta else None
    erase = {erases: rng.normal(size=k.shape) / 2} if erases else {}
    g = 0 * g if gate == "none" else g
    return Stream(q, k, v, g, beta, **erase), rng.normal(size=(b, m, d, e))


def assert_equal(result, expected):
    for one, other in zip(result, expected, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("t", [1, 6, 13])
@pytest.mark.parametrize("gate", GATES)
def test_token_by_token_equals_all_pairs_at_once(gate, t):
    x, state = stream(np.random.default_rng(0), gate, t=t)
    assert_equal(recurrent(x, state), parallel(x, state))


@pytest.mark.parametrize("t", [1, 6, 13])
@pytest.mark.parametrize("gate", ["none", "head", "key"])
@pytest.mark.parametrize("erases", [None, "erase", "undecayed"])
def test_token_by_token_equals_all_pairs_at_once_for_the_delta_rule(gate, erases, t):
    x, state = stream(np.random.default_rng(1), gate, is_delta=True, erases=erases, t=t)
    assert_equal(recurrent(x, state), parallel(x, state))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gate", ["none", "head", "key"])
@settings(max_examples=15, deadline=None, database=None)
@given(s=st.integers(1, 20), chunk=st.integers(1, 24), sub_chunk=st.integers(1, 8))
def test_token_by_token_equals_chunk_by_chunk(gate, rule, s, chunk, sub_chunk):
    x, state = stream(np.random.default_rng(s), gate, **RULES[rule], t=s, s=s)
    assert_equal(recurrent(x, state), chunkwise(x, state, chunk, sub_chunk))


def test_the_delta_rule_with_a_gate_for_each_value_channel_has_no_parallel_form():
    x, state = stream(np.random.default_rng(2), "value", is_delta=True)
    with pytest.raises(ValueError, match="no gate for each value channel"):
        parallel(x, state)


def test_a_gate_for_each_value_channel_has_no_chunkwise_form():
    x, state = stream(np.random.default_rng(2), "value")
    with pytest.raises(ValueError, match="no gate for each value channel"):
        chunkwise(x, state, 4, 2)


GATES_TO_SURVIVE = {
    "open": lambda rng, shape: np.zeros(shape),
    "closed": lambda rng, shape: np.full(shape, -50.0),
    "either": lambda rng, shape: rng.choice([0.0, -50.0], size=shape),
    "decaying": lambda rng, shape: np.full(shape, -3.0),
}


@pytest.mark.parametrize("is_delta", [False, True])
@pytest.mark.parametrize("gates", GATES_TO_SURVIVE)
def test_chunks_are_accurate_for_any_gate_in_float32(gates, is_delta):
    """Over 64 tokens e^{−G} reaches e^{3200}: a separate factor would overflow."""
    rng = np.random.default_rng(3)
    x, state = stream(rng, "key", is_delta=is_delta, t=64, s=64)
    x = x._replace(g=GATES_TO_SURVIVE[gates](rng, x.g.shape))
    expected = recurrent(x, state)
    narrow = Stream(*(None if a is None else a.astype(np.float32) for a in x))
    result = chunkwise(narrow, state.astype(np.float32), 64, 16)
    for one, other in zip(result, expected, strict=True):
        assert one.dtype == np.float32
        assert np.abs(one - other).max() <= 2e-5 * np.abs(other).max()


def test_a_separate_factor_overflows():
    with np.errstate(over="ignore"):
        assert np.isinf(np.exp(-np.cumsum(np.full(64, -3.0, dtype=np.float32)))).any()


def test_a_gate_of_minus_infinity_forgets_everything():
    rng = np.random.default_rng(4)
    x, state = stream(rng, "head")
    x.g[:, :, 5] = -np.inf
    out, final = recurrent(x, state)
    behind = Stream(*(None if a is None else a[:, :, 5:] for a in x))
    assert_equal((out[:, :, 5:], final), recurrent(behind, 0 * state))
    d_out, d_final = rng.normal(size=out.shape), rng.normal(size=final.shape)
    d_out[:, :, :5] = 0
    gradients = recurrent_vjp(x, state, d_out, d_final)
    assert np.all(gradients.state == 0)
    assert np.all(gradients.stream.g[:, :, 5] == 0)
    assert all(np.all(np.isfinite(a)) for a in gradients.stream if a is not None)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gate", GATES)
def test_gradients_are_those_of_finite_differences(gate, rule):
    rng = np.random.default_rng(5)
    x, state = stream(rng, gate, **RULES[rule], t=4, s=6)
    out, final = recurrent(x, state)
    d_out, d_final = rng.normal(size=out.shape), rng.normal(size=final.shape)
    gradients = recurrent_vjp(x, state, d_out, d_final)
    values, result = [*x, state], [*gradients.stream, gradients.state]
    for i, value in enumerate(values):
        if value is None:
            continue
        direction = rng.normal(size=value.shape)

        def along(h, i=i, direction=direction):
            moved = [*values[:i], values[i] + h * direction, *values[i + 1 :]]
            o, last = recurrent(Stream(*moved[:-1]), moved[-1])
            return np.sum(o * d_out) + np.sum(last * d_final)

        expected = (along(1e-6) - along(-1e-6)) / 2e-6
        assert abs(np.sum(result[i] * direction) - expected) <= 1e-6 * max(1, abs(expected))
