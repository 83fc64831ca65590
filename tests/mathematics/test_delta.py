"""The delta rule, gated or not: contraction, retrieval, relations to sums and to reflections."""

import numpy as np
import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.identities import assert_close
from tests.mathematics.linear_definitions import (
    DELTA,
    LinearProblem,
    close,
    close_to_definition,
    of_tokens,
    problems,
    sampled,
)

KEYS = {
    "same": lambda k: k[:, :1] + 0 * k,
    "twice": lambda k: np.repeat(k[:, ::2], 2, axis=1)[:, : k.shape[1]],
    "opposite": lambda k: k[:, :1] * (-1.0) ** np.arange(k.shape[1])[:, None, None],
    "orthogonal": lambda k: 0 * k + np.eye(3)[np.arange(k.shape[1]) % 3][:, None],
    "zero": np.zeros_like,
    "some zero": lambda k: k * (np.arange(k.shape[1]) % 2)[:, None, None],
}


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("betas", [[0.0], [1.0], [2.0], [0.0, 2.0]])
@pytest.mark.parametrize("layer", DELTA)
def test_the_delta_rule_with_extreme_betas_and_keys_is_that_of_the_definition(layer, betas, keys):
    layer, p = pa.parse(layer), LinearProblem(np.random.default_rng(0), s=70, group=2, multiple=2)
    x = p.x(layer)
    x["k"] = KEYS[keys](x["k"])
    for name in {"beta", "b"} & set(x):
        x[name] = p.rng.choice(betas, size=x[name].shape)
    close_to_definition(layer, p, x)
    close_to_definition(layer, p, x, p.states(layer.init_cache(**x)))


@pytest.mark.parametrize("layer", ["delta", "gated_delta", "kda"])
@sampled
@given(p=problems(longest=6), reach=st.floats(0, 2))
def test_the_delta_rule_contracts_where_beta_times_the_squared_key_is_at_most_2(layer, p, reach):
    """If β ‖k‖² ≤ 2, a token increases the norm of the state by at most β ‖k‖ ‖v‖."""
    layer = pa.parse(layer)
    x = p.x(layer)
    lengths = p.rng.uniform(0.3, 3, size=x["k"].shape[:3])
    x["k"] = lengths[..., None] * x["k"]
    lengths = np.repeat(lengths, p.multiple, axis=2)
    x["beta"] = reach / lengths**2
    written = x["beta"] * lengths * np.linalg.norm(x["v"], axis=-1)
    cache = layer.init_cache(**x)
    cache = cache._replace(store=p.states(cache))
    for j in range(p.sizes["s"]):
        (before,) = cache.store.values()
        _, cache = layer.extend(cache, **of_tokens(x, slice(j, j + 1)))
        (after,) = cache.store.values()
        kept = np.exp(x["g"][:, j]) if "g" in x else 1
        kept = kept.max(-1) if np.ndim(kept) == 3 else kept
        bound = kept * np.linalg.norm(before, axis=(2, 3)) + written[:, j]
        assert np.all(np.linalg.norm(after, axis=(2, 3)) <= bound * (1 + 1e-12))


@pytest.mark.parametrize("gate", [0.0, -0.5])
@pytest.mark.parametrize("reach", [0.0, 0.5, 1.0, 1.9, 2.0, 2.5, 4.0])
def test_along_a_repeated_key_a_state_is_multiplied_by_one_minus_beta_of_its_square(reach, gate):
    """Zero values give k · S_t = (e^g (1 − β ‖k‖²))^t k · S_0, which grows outside of [0, 2]."""
    p, layer = LinearProblem(np.random.default_rng(0), s=70, multiple=2), pa.GatedDelta(scale=1.0)
    x = p.x(layer)
    k = np.broadcast_to(3 * x["k"][:, :1], x["k"].shape).copy()
    x |= {"q": k, "k": k, "v": 0 * x["v"], "g": 0 * x["g"] + gate, "beta": 0 * x["g"] + reach / 9}
    cache = layer.init_cache(**x)
    ((name, first),) = p.states(cache).items()
    out, last = layer.extend(cache._replace(store={name: first}), **x)
    along = np.einsum("bhd,bude->bue", k[:, 0], first)
    factors = (np.exp(gate) * (1 - reach)) ** np.arange(1, 71)
    expected = factors[:, None, None] * along[:, None]
    growing = np.maximum(np.abs(factors), 1)[None, :, None, None]
    assert_close(out / growing, expected / growing, size=100)
    rest = first - k[:, 0, :, :, None] / 9 * along[:, :, None]
    expected = np.exp(70 * gate) * rest + factors[-1] * (first - rest)
    close(last.store[name] / growing[:, -1], expected / growing[:, -1])


@sampled
@given(problems(square=False))
def test_with_orthonormal_keys_the_delta_rule_only_adds(p):
    b, s, h = p.shape("b s h")
    p.sizes["d"] = s + 1
    x = p.x(pa.GatedDelta())
    x["k"] = np.linalg.qr(p.rng.normal(size=(b, h, s + 1, s)))[0].transpose(0, 3, 1, 2)
    values = x["beta"][..., None] * x["v"]
    added = pa.SSD(scale=None)(x["q"], x["k"], values, g=x["g"])
    close(pa.GatedDelta()(**x), added)
    ungated = pa.Delta()(x["q"], x["k"], x["v"], beta=x["beta"])
    close(ungated, pa.SSD(scale=None)(x["q"], x["k"], values, g=0 * x["g"]))


@sampled
@given(problems(), st.sampled_from(["delta[scale=1]", "gated_delta[scale=1]"]))
def test_with_beta_of_one_the_written_value_is_read_back(p, text):
    layer = pa.parse(text)
    x = p.x(layer)
    x |= {"q": x["k"], "beta": np.ones_like(x["beta"])}
    close(layer(**x), x["v"])
    seen_first = np.broadcast_to(x["k"][:, :1], x["k"].shape)
    repeated = x | {"k": seen_first.copy(), "q": seen_first.copy()}
    close(layer(**repeated), x["v"])
    repeated["beta"] = np.full_like(x["beta"], 2.0)
    repeated["v"] = np.zeros_like(x["v"])
    repeated["v"][:, 0] = x["v"][:, 0]
    flipped = 2 * x["v"][:, :1] * (-1.0) ** np.arange(p.sizes["s"])[:, None, None]
    decay = np.exp(np.cumsum(x["g"], axis=1) - x["g"][:, :1]) if "g" in x else np.ones(())
    close(layer(**repeated), flipped * decay[..., None])


def path_scores(q, k, beta):
    """The scores of PaTH with keys as its directions, from its weights: A_ij − A_ii = log ratio."""
    b, s, h, _ = k.shape
    values = np.broadcast_to(np.eye(s)[:, None], (b, s, h, s)).copy()
    weights = pa.Path(scale=1.0)(q, k, values, w=k, beta=beta)
    weights = np.where(np.tril(np.ones((s, s)))[:, None] > 0, weights, 1.0)
    diagonal = np.sum(q * k, axis=-1)[..., None]
    scores = np.log(weights) - np.log(np.einsum("bihi->bih", weights))[..., None] + diagonal
    return np.tril(scores.transpose(0, 2, 1, 3))


@sampled
@given(problems(heads=1))
def test_the_delta_rule_is_a_linear_read_of_the_scores_of_path(p):
    x = p.x(pa.Delta())
    scores = path_scores(x["q"], x["k"], x["beta"])
    expected = np.einsum("bhij,bjhe->bihe", scores, x["beta"][..., None] * x["v"])
    close(pa.Delta(scale=1.0)(**x), expected)
