"""The backends' chunkwise form against the definition, token by token.

Every kind of decay, with open, closed and intermediate gates; any number of tokens and of queries;
with an initial state and a gradient of the last one. An equality has to hold to 1e-10 of the
largest number in float64, and to 2e-5 in float32.
"""

import array_api_strict
import numpy as np
import pytest
import torch

from precondattn.spec.recurrence import Stream, recurrent, recurrent_vjp
from precondattn_portable import chunkwise
from precondattn_portable.arithmetic import IN_PLACE, STANDARD
from precondattn_portable.chunkwise import Chunkwise
from precondattn_portable.triangular_inverse import unit_lower_inverse

CHUNK = 8
TOKENS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5]
KINDS = ["none", "head", "key", "value", "delta", "gated delta"]


@pytest.fixture(autouse=True)
def several_groups(monkeypatch):
    """Two chunks per group, so that three chunks have two groups."""
    monkeypatch.setattr(chunkwise, "GROUP", 2 * 4 * CHUNK * CHUNK)


def some_gates(rng, shape):
    mixed = rng.choice([0.0, -1e-3, -30.0, -1e4, -np.inf, -1.0], size=shape)
    weak = -np.exp(0.7 * rng.normal(size=shape))
    return np.where(rng.random(size=shape) < 0.4, mixed, weak)


def some_keys(rng, shape):
    """Keys of length 1 or 0, many of them equal."""
    few = rng.normal(size=(4, shape[-1]))
    few /= np.linalg.vector_norm(few, axis=-1, keepdims=True)
    few[0] = 0
    other = rng.normal(size=shape)
    other /= np.linalg.vector_norm(other, axis=-1, keepdims=True)
    return np.where(
        rng.random(size=shape[:-1])[..., None] < 0.5, few[rng.integers(4, size=shape[:-1])], other
    )


def some_stream(rng, kind, s, t, r, gates=some_gates):
    """A stream, its initial state, and cotangents of the outputs and the last state."""
    b, m, d, e = 2, 2, 4, 3
    k, v, q = (
        some_keys(rng, (b, m, s, d)),
        rng.normal(size=(b, m, s, e)),
        rng.normal(size=(b, m, t, r, d)),
    )
    shape = (b, m, s, d if kind == "key" else 1, e if kind == "value" else 1)
    g = np.zeros(shape) if kind in ("none", "delta") else gates(rng, shape)
    beta = rng.choice([0.0, 1.0, 2.0, 0.3], size=(b, m, s)) if "delta" in kind else None
    state = rng.normal(size=(b, m, d, e))
    gradients = rng.normal(size=(b, m, t, r, e)), rng.normal(size=state.shape)
    return Stream(q, k, v, g, beta), state, *gradients


def all_equal(result, expected, bound=1e-10):
    for one, other in zip(result, expected, strict=True):
        assert (one is None) == (other is None)
        if one is None:
            continue
        one = np.asarray(one)
        assert one.shape == other.shape
        assert np.all(np.isfinite(one))
        assert np.abs(one - other).max() <= bound * max(np.abs(other).max(), 1e-6)


def check(given, form, to=lambda a: a, bound=1e-10):
    x, state, d_o, d_final = given
    moved = Stream(*(None if a is None else to(a) for a in x))
    all_equal(form.forward(moved, to(state)), recurrent(x, state), bound)
    result = form.vjp(moved, to(state), to(d_o), to(d_final))
    expected = recurrent_vjp(x, state, d_o, d_final)
    all_equal([*result.stream, result.state], [*expected.stream, expected.state], bound)


@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("s", TOKENS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_chunkwise_form_equals_the_definition(kind, s, r):
    rng = np.random.default_rng([KINDS.index(kind), s, r])
    for t in sorted({s, max(s - 2, 1), 1}):
        check(some_stream(rng, kind, s, t, r), Chunkwise(IN_PLACE, CHUNK))


@pytest.mark.parametrize("kind", KINDS)
def test_the_chunkwise_form_equals_the_definition_in_pytorch_and_in_the_array_api_standard(kind):
    rng = np.random.default_rng(1)
    for s, t, r in [(21, 14, 2), (3, 3, 1)]:
        given = some_stream(rng, kind, s, t, r)
        check(given, Chunkwise(STANDARD, CHUNK), torch.from_numpy)
        check(given, Chunkwise(STANDARD, CHUNK), array_api_strict.asarray)


GATES = {
    "open": lambda rng, shape: np.zeros(shape),
    "weak": lambda rng, shape: np.full(shape, -1e-3),
    "strong": lambda rng, shape: np.full(shape, -30.0),
    "closed": lambda rng, shape: np.full(shape, -np.inf),
    "either": lambda rng, shape: rng.choice([0.0, -1e4], size=shape),
    "one closed": lambda rng, shape: (
        np.where(np.arange(shape[2]) % 11 == 5, -np.inf, -0.1)[:, None, None] + np.zeros(shape)
    ),
    "any": some_gates,
}


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("kind", ["head", "key", "value", "gated delta"])
def test_no_gate_costs_accuracy(kind, gates):
    """Strong gates in chunks of 64 cost no digits, in float64 and in float32."""
    given = some_stream(np.random.default_rng(2), kind, 70, 70, 1, GATES[gates])
    check(given, Chunkwise(IN_PLACE))
    check(given, Chunkwise(IN_PLACE), lambda a: a.astype(np.float32), 2e-5)


def test_the_chunkwise_form_does_not_modify_its_inputs():
    rng = np.random.default_rng(3)
    for kind in KINDS:
        x, *others = some_stream(rng, kind, 16, 16, 1)
        arrays = [a for a in (*x, *others) if a is not None]
        before = [a.copy() for a in arrays]
        form = Chunkwise(IN_PLACE, CHUNK)
        form.forward(x, others[0])
        form.vjp(x, *others)
        assert all(np.array_equal(a, b) for a, b in zip(arrays, before, strict=True))


def test_unsupported_decays_are_refused():
    x, state, *_ = some_stream(np.random.default_rng(4), "value", 4, 4, 1)
    with pytest.raises(ValueError, match="one for each value channel; found 1 x 3 decays"):
        Chunkwise(IN_PLACE).forward(x._replace(beta=np.ones((2, 2, 4))), state)


def triangles(size):
    rng = np.random.default_rng(size)
    k = rng.normal(size=(3, size, 8))
    k /= np.linalg.vector_norm(k, axis=-1, keepdims=True)
    near = k[:, :1] + 1e-3 * k
    ones = np.ones((3, size, size))
    result = [
        k @ np.swapaxes(k, -1, -2),
        near @ np.swapaxes(near, -1, -2),
        ones,
        -ones / 3,
        2 * ones,
    ]
    return np.tril(np.stack(result), -1)


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 16, 24, 33, 64, 100, 128])
def test_the_inverse_of_triangular_matrices(size):
    strict = triangles(size)[: 5 if size <= 64 else 3]
    before = strict.copy()
    expected = np.linalg.inv(np.eye(size) + strict)
    bound = 1e-11 * np.abs(expected).max(axis=(-2, -1), keepdims=True)
    for ops, to in [
        (IN_PLACE, np.asarray),
        (STANDARD, torch.from_numpy),
        (STANDARD, array_api_strict.asarray),
    ]:
        result = np.asarray(unit_lower_inverse(ops, to(strict)))
        assert np.all(np.abs(result - expected) <= bound)
    assert np.array_equal(strict, before)
    narrow = unit_lower_inverse(IN_PLACE, strict.astype(np.float32))
    assert narrow.dtype == np.float32
    assert np.all(np.abs(narrow - expected) <= 1e6 * bound)
