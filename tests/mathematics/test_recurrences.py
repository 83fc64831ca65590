"""Recurrences at the limits of their gates, strengths and keys, and the theorems of the delta rule.

Outputs, gradients and states of ordinary inputs are compared with their definitions in
`test_definitions.py`; those of extreme ones are compared with the same definitions here.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precondattn as pa
from precondattn.spec.recurrence import Stream, recurrent, recurrent_vjp
from tests.mathematics.definitions import (
    assert_gradients,
    assert_is_defined,
    close,
    definition,
    derivative,
)
from tests.mathematics.identities import assert_close
from tests.mathematics.problems import Problem, problems

GATED = [
    "ssd",
    "gla",
    "hgrn2",
    "rwkv6",
    "gsa",
    "mlstm",
    "gated_delta",
    "kda",
    "gdn2",
    "comba",
    "dplr",
]
DELTA = ["delta", "gated_delta", "kda", "gdn2", "comba"]


def a_problem(m, s=12):
    """A problem of grouped heads, and its inputs, of which no gate or strength is at a limit."""
    p = Problem(s, s=s, t=s - 2, n=2, group=2, values=1 if m.name in ("gla", "rwkv6") else 2)
    x = p.x(m)
    for name in ("g", "beta", "b", "w"):
        if name in x and not m.inputs[name].unit:
            x[name] = (
                -p.rng.exponential(size=x[name].shape)
                if name == "g"
                else (p.rng.uniform(0.1, 1, size=x[name].shape))
            )
    return p, x


@pytest.mark.parametrize("text", GATED)
@pytest.mark.parametrize("gates", [[0.0], [-50.0], [-1e6], [0.0, -1e6], [0.0, -1e-4, -1.0, -1e9]])
def test_gates_may_be_open_or_closed_or_mixed(text, gates):
    m = pa.parse(text)
    p, x = a_problem(m)
    x["g"] = p.rng.choice(gates, size=x["g"].shape)
    assert_is_defined(m, x)
    x["q"] = p.rng.normal(size=(2, 12, *x["q"].shape[2:]))
    cache = m.init_cache(**x)
    states = p.states(cache)
    out, last, pullback = m.extend_vjp(cache._replace(store=states), **x)
    expected, wanted = definition(m, x, states)
    close(out, expected.real)
    d_last = {name: p.like(array) for name, array in last.store.items()}
    for name, array in last.store.items():
        close(array, wanted[name].real)
    d_out = p.like(out)
    gradients, d_states = pullback(d_out, d_last)
    assert_gradients(m, x, gradients | d_states, d_out, states, d_last)


@pytest.mark.parametrize("text", GATED)
@pytest.mark.parametrize("border", [3, 9])
def test_a_nearly_closed_gate_costs_tokens_on_its_other_side_no_accuracy(text, border):
    """Values of 1e15 before the gate, or cotangents after it, are of size 1e-7 beyond it."""
    m = pa.parse(text)
    p, x = a_problem(m)
    x["q"] = p.rng.normal(size=(2, 12, *x["q"].shape[2:]))
    x["g"] /= 10
    x["g"][:, border] = -50
    out, pullback = m.vjp(**x)
    d_out, large = p.like(out), x | {"v": x["v"].copy()}
    large["v"][:, :border] *= 1e15
    later, earlier = slice(border, None), slice(border)
    out, of_later = m.vjp(**large)
    close(out[:, later], definition(m, large)[0].real[:, later])
    after = d_out.copy()
    after[:, later] *= 1e15
    for inputs, gradients, cotangent, kept in (
        (large, of_later(d_out), d_out, later),
        (x, pullback(after), after, earlier),
    ):
        for name, gradient in gradients.items():
            if m.inputs[name].time_axis is None:
                continue
            direction = np.zeros(gradient.shape)
            direction[:, kept] = p.rng.normal(size=gradient[:, kept].shape)
            terms = gradient * direction
            expected = derivative(m, inputs, name, direction, cotangent)
            assert abs(terms.sum() - expected) <= 1e-9 * (1 + np.abs(terms).sum()), name


@pytest.mark.parametrize("gate", ["head", "key", "value"])
def test_a_gate_of_minus_infinity_forgets_everything(gate):
    rng, shape = np.random.default_rng(4), {"head": (1, 1), "key": (4, 1), "value": (1, 3)}[gate]
    q, k, v = rng.normal(size=(2, 2, 13, 2, 4)), rng.normal(size=(2, 2, 13, 4)), None
    v, g = rng.normal(size=(2, 2, 13, 3)), -np.exp(rng.normal(size=(2, 2, 13, *shape)))
    g[:, :, 5] = -np.inf
    x, state = Stream(q, k, v, g, None), rng.normal(size=(2, 2, 4, 3))
    out, final = recurrent(x, state)
    behind = Stream(*(None if a is None else a[:, :, 5:] for a in x))
    expected, last = recurrent(behind, 0 * state)
    assert_close(out[:, :, 5:], expected)
    assert_close(final, last)
    d_out = rng.normal(size=out.shape)
    d_out[:, :, :5] = 0
    gradients = recurrent_vjp(x, state, d_out, rng.normal(size=final.shape))
    assert np.all(gradients.state == 0)
    assert np.all(gradients.stream.g[:, :, 5] == 0)
    assert all(np.all(np.isfinite(a)) for a in gradients.stream if a is not None)


KEYS = {
    "same": lambda k: k[:, :1] + 0 * k,
    "twice": lambda k: np.repeat(k[:, ::2], 2, axis=1)[:, : k.shape[1]],
    "opposite": lambda k: k[:, :1] * (-1.0) ** np.arange(k.shape[1])[:, None, None],
    "orthogonal": lambda k: 0 * k + np.eye(3)[np.arange(k.shape[1]) % 3][:, None],
    "zero": np.zeros_like,
    "some zero": lambda k: k * (np.arange(k.shape[1]) % 2)[:, None, None],
}


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("text", DELTA)
def test_the_delta_rule_with_extreme_betas_and_keys_is_that_of_the_definition(text, keys):
    m = pa.parse(text)
    p, x = a_problem(m)
    x["k"] = KEYS[keys](x["k"])
    for betas in ([0.0], [1.0], [2.0], [0.0, 2.0]):
        for name in {"beta", "b"} & set(x):
            x[name] = p.rng.choice(betas, size=x[name].shape)
        assert_is_defined(m, x)


# Theorems of the delta rule


@pytest.mark.parametrize("text", ["delta", "gated_delta", "kda"])
@given(p=problems(longest=6, square=True), reach=st.floats(0, 2))
def test_the_delta_rule_contracts_where_beta_times_the_squared_key_is_at_most_2(text, p, reach):
    """If β ‖k‖² ≤ 2, a token increases the norm of the state by at most β ‖k‖ ‖v‖."""
    m = pa.parse(text)
    x = p.x(m)
    lengths = p.rng.uniform(0.3, 3, size=x["k"].shape[:3])
    x["k"] = lengths[..., None] * x["k"]
    x["beta"] = reach / lengths**2
    written = x["beta"] * lengths * np.linalg.norm(x["v"], axis=-1)
    cache = m.init_cache(**x)
    cache = cache._replace(store=p.states(cache))
    for j in range(x["k"].shape[1]):
        (before,) = cache.store.values()
        _, cache = m.extend(cache, **{name: a[:, j : j + 1] for name, a in x.items()})
        (after,) = cache.store.values()
        kept = np.exp(x["g"][:, j]) if "g" in x else 1
        kept = kept.max(-1) if np.ndim(kept) == 3 else kept
        bound = kept * np.linalg.norm(before, axis=(2, 3)) + written[:, j]
        assert np.all(np.linalg.norm(after, axis=(2, 3)) <= bound * (1 + 1e-12))


@pytest.mark.parametrize("gate", [0.0, -0.5])
@pytest.mark.parametrize("reach", [0.0, 0.5, 1.0, 1.9, 2.0, 2.5, 4.0])
def test_along_a_repeated_key_a_state_is_multiplied_by_one_minus_beta_of_its_square(reach, gate):
    """Zero values give k · S_t = (e^g (1 − β ‖k‖²))^t k · S_0, which grows outside of [0, 2]."""
    p, m = Problem(s=70, values=2), pa.GatedDelta(scale=1.0)
    x = p.x(m)
    k = np.broadcast_to(3 * x["k"][:, :1], x["k"].shape).copy()
    zero = np.zeros_like(x["beta"])
    x |= {"q": k, "k": k, "v": 0 * x["v"], "g": zero + gate, "beta": zero + reach / 9}
    cache = m.init_cache(**x)
    ((name, first),) = p.states(cache).items()
    out, last = m.extend(cache._replace(store={name: first}), **x)
    along = np.einsum("bhd,bude->bue", k[:, 0], first)
    factors = (np.exp(gate) * (1 - reach)) ** np.arange(1, 71)
    expected = factors[:, None, None] * along[:, None]
    growing = np.maximum(np.abs(factors), 1)[None, :, None, None]
    assert_close(out / growing, expected / growing, size=100)
    rest = first - k[:, 0, :, :, None] / 9 * along[:, :, None]
    expected = np.exp(70 * gate) * rest + factors[-1] * (first - rest)
    close(last.store[name] / growing[:, -1], expected / growing[:, -1])


@pytest.mark.parametrize("text", ["delta[scale=1]", "gated_delta[scale=1]"])
def test_with_beta_of_one_the_written_value_is_read_back(text):
    m, p = pa.parse(text), Problem(s=6, n=2)
    x = p.x(m)
    x |= {"q": x["k"], "beta": np.ones_like(x["beta"])}
    close(m(**x), x["v"])
    first = np.broadcast_to(x["k"][:, :1], x["k"].shape).copy()
    repeated = x | {"k": first, "q": first}
    close(m(**repeated), x["v"])
    only_first = np.where(np.arange(6)[:, None, None] == 0, x["v"], 0)
    flipped = 2 * x["v"][:, :1] * (-1.0) ** np.arange(6)[:, None, None]
    decay = np.exp(np.cumsum(x["g"], axis=1) - x["g"][:, :1]) if "g" in x else np.ones(())
    out = m(**(repeated | {"beta": np.full_like(x["beta"], 2.0), "v": only_first}))
    close(out, flipped * decay[..., None])


def test_the_delta_rule_is_a_linear_read_of_the_scores_of_path():
    """A_ij = q_iᵀ H_i … H_{j+1} k_j, from the logarithms of PaTH's weights, with keys as w."""
    p, m = Problem(s=7, n=2), pa.Delta(scale=1.0)
    x = p.x(m)
    q, k, beta = (x[name] for name in ("q", "k", "beta"))
    eye = np.broadcast_to(np.eye(7)[:, None], (2, 7, 2, 7)).copy()
    weights = pa.Path(scale=1.0)(q, k, eye, w=k, beta=beta).transpose(0, 2, 1, 3)
    below = np.tril(np.ones((7, 7), dtype=bool))
    logs = np.log(np.where(below, weights, 1.0))
    diagonal = np.einsum("bthd,bthd->bht", q, k) - np.einsum("bhtt->bht", logs)
    scores = np.where(below, logs + diagonal[..., None], 0)
    close(m(**x), np.einsum("bhij,bjhe->bihe", scores, beta[..., None] * x["v"]))


def test_two_reflections_of_delta_product_rotate_the_state():
    """A swap of two coordinates and a sign: one step has no such eigenvalues."""
    k = np.asarray([[1.0, -1.0], [1.0, 0.0]]) / np.asarray([[2**0.5], [1.0]])
    x = {"k": k.reshape(1, 1, 2, 1, 2), "v": np.zeros((1, 1, 2, 1, 2)), "g": np.zeros((1, 1, 1))}
    x |= {"q": np.zeros((1, 1, 1, 2)), "beta": np.full((1, 1, 2, 1), 2.0)}
    m = pa.DeltaProduct()
    cache = m.init_cache(**x)
    (name,) = cache.store
    _, last = m.extend(cache._replace(store={name: np.eye(2).reshape(1, 1, 2, 2)}), **x)
    rotation = last.store[name][0, 0]
    assert np.allclose(rotation @ rotation, -np.eye(2))


# Normalised reads, feature maps and ATK


def test_eps_is_added_to_the_sum_of_the_scaled_weights():
    q = k = np.full((1, 3, 1, 1), 2.0)
    v = np.asarray([3.0, 5.0, 7.0]).reshape(1, 3, 1, 1)
    out = pa.Linear(scale=0.5, normalize=True, eps=0.25)(q, k, v)
    close(out.ravel(), np.asarray([2 * 3 / 2.25, 2 * 8 / 4.25, 2 * 15 / 6.25]))


def test_a_row_without_weights_is_zero_without_eps_and_so_is_its_gradient():
    m, p = pa.parse("elu1(linear[normalize=true,eps=0])"), Problem(s=4)
    out, pullback = m.vjp(**p.x(m), key_mask=np.asarray([[False, False, True, True]] * 2))
    gradients = pullback(np.ones_like(out))
    assert np.all(out[:, :2] == 0)
    assert np.all(gradients["q"][:, :2] == 0)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())


@pytest.mark.parametrize(("text", "total"), [("hedgehog(linear)", 1), ("elu1(linear)", None)])
def test_features_are_positive_and_those_of_hedgehog_sum_to_one(text, total):
    """A state of one token and a value of 1 is the features of its key."""
    m = pa.parse(text)
    x = Problem(s=1, n=2, d=5).x(m)
    x["v"] = np.ones_like(x["v"])
    _, cache = m.extend(m.init_cache(**x), **x)
    (state,) = cache.store.values()
    assert np.all(state > 0)
    if total is not None:
        close(state.sum(2), np.ones(state.sum(2).shape))


@pytest.mark.parametrize("bound", [1.5, 2.0])
def test_the_factors_of_atk_are_between_1_over_x_and_x_for_any_keys(bound):
    rng = np.random.default_rng(0)
    k = rng.normal(size=(1, 50, 2, 4)) * rng.choice([0.0, 1e-30, 1.0, 1e30], size=(1, 50, 1, 1))
    g = rng.choice([0.0, -1.0, -50.0], size=(1, 50, 2))
    out = pa.PreconditionedKey(bound=bound)(k, g_atk=g, beta_atk=np.ones_like(g))
    factors = out[k != 0] / k[k != 0]
    assert np.all(factors >= 1 / bound)
    assert np.all(factors <= bound)


@pytest.mark.parametrize("text", ["delta", "gated_delta", "kda", "gdn2"])
def test_a_rule_with_an_erase_key_erases_with_it_and_writes_with_the_other(text):
    m, p = pa.parse(text), Problem(s=6, n=2, values=2)
    x, rule = p.x(m), pa.parse(f"erasing_{text}")
    close(rule(**x, erase=x["k"]), m(**x))
    written = rule(**x | {"k": 0.7 * x["k"]}, erase=x["k"])
    close(written, rule(**x | {"q": 0.7 * x["q"]}, erase=0.7 * x["k"]))


@pytest.mark.parametrize("text", ["ccq(atk)", "qk_norm(stable_step)"])
def test_the_gradient_of_a_zero_key_under_a_norm_is_that_of_a_small_enough_difference(text):
    """The norm has the slope 1/√ε there, and its result is squared and compared with ε."""
    m, p = pa.parse(text), Problem(s=7, n=2)
    x = p.x(m, k=p.k * (np.arange(7) % 3 > 0)[:, None, None])
    out, pullback = m.vjp(**x)
    d_out, direction = p.like(out), p.like(x["k"])
    expected = np.sum(pullback(d_out)["k"] * direction)
    above, below = (np.sum(d_out * m(**x | {"k": x["k"] + h * direction})) for h in (1e-9, -1e-9))
    assert abs((above - below) / 2e-9 - expected) < 1e-6 * abs(expected)


def test_the_gradient_of_an_almost_empty_state_of_atk_is_that_of_the_definition():
    """A feature map leaves such channels: the logarithm is curved over the distance ε."""
    m, p = pa.ATK(), Problem(s=7, n=2)
    x = p.x(m)
    cache = m.init_cache(**x)
    states = p.states(cache)
    states |= {name: 0 * a + 1e-8 for name, a in states.items() if "squares" in name}
    out, _, pullback = m.extend_vjp(cache._replace(store=states), **x)
    d_out = p.like(out)
    gradients, d_states = pullback(d_out)
    assert_gradients(m, x, gradients | d_states, d_out, states)


# The pullback of an extension


def linear_cache():
    x = {name: np.ones((1, 2, 1, 2)) for name in "qkv"}
    return pa.Linear(), x, pa.Linear().init_cache(**x)


@pytest.mark.parametrize("text", ["gsa", "mlstm", "ccq(gated_delta)"])
def test_cotangents_of_states_may_be_a_cache_and_zero_where_they_are_missing(text):
    m, p = pa.parse(text), Problem(s=4, n=2)
    x = p.x(m)
    cache = m.init_cache(**x)
    out, last, pullback = m.extend_vjp(cache, **x)
    d_out = p.like(out)
    by_dict, by_cache = pullback(d_out, dict(last.store)), pullback(d_out, last)
    assert list(by_cache[1]) == list(cache.store)
    missing, zero = pullback(d_out), {name: np.zeros_like(a) for name, a in last.store.items()}
    for results in ((by_dict, by_cache), (pullback(d_out, zero), missing)):
        for expected, found in zip(*results, strict=True):
            assert all(np.array_equal(a, found[name]) for name, a in expected.items())
    expected = m.vjp(**x)[1](d_out)
    assert all(np.allclose(a, missing[0][name], atol=1e-12) for name, a in expected.items())


@pytest.mark.parametrize("text", ["gated_delta", "mlstm[eps=0.1]", "linear[normalize=true]"])
def test_torch_differentiates_a_chain_of_extensions(text):
    torch = pytest.importorskip("torch")
    m, p = pa.parse(text), Problem(s=5, n=2, group=2, spread=0.3)
    x = {name: np.abs(a) if name in "qk" else a for name, a in p.x(m).items()}
    cache = m.init_cache(**x)
    states = p.states(cache)
    leaves = {n: torch.tensor(a, requires_grad=True) for n, a in (x | states).items()}
    inputs, outs = {name: leaves[name] for name in x}, []
    past = m.init_cache(**inputs)._replace(store={name: leaves[name] for name in states})
    for part in (slice(0, 2), slice(2, 5)):
        out, past = m.extend(past, **{name: a[:, part] for name, a in inputs.items()})
        outs.append(out)
    out = torch.cat(outs, dim=1)
    d_out, d_last = p.like(out), {name: p.like(a) for name, a in states.items()}
    total = (out * torch.tensor(d_out)).sum()
    for name, cotangent in d_last.items():
        total = total + (past.store[name] * torch.tensor(cotangent)).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()))
    named = {name: g.numpy() for name, g in zip(leaves, gradients, strict=True)}
    assert_gradients(m, x, named, d_out, states, d_last)


@pytest.mark.parametrize("wrong", [np.ones(3), [1.0], "state"])
def test_cotangents_of_states_must_be_named(wrong):
    m, x, cache = linear_cache()
    out, _, pullback = m.extend_vjp(cache, **x)
    with pytest.raises(TypeError, match="cotangents of buffers must be a dict by buffer name"):
        pullback(out, wrong)


def test_states_and_caches_that_do_not_fit_are_refused_by_name():
    m, x, cache = linear_cache()
    out, _, pullback = m.extend_vjp(cache, **x)
    with pytest.raises(ValueError, match=r"no buffer 'state'; it has linear.state\(k, v\)"):
        pullback(out, {"state": out})
    with pytest.raises(ValueError, match=r"cotangent of 'linear.state\(k, v\)' must have"):
        pullback(out, {"linear.state(k, v)": out})
    with pytest.raises(TypeError, match="unknown keyword 'donate'"):
        m.extend_vjp(cache, **x, donate=True)
    with pytest.raises(ValueError, match="is not causal, so it can not have a cache"):
        pa.Softmax(causal=False).extend_vjp(cache, **x)


def test_a_sequence_with_a_length_out_of_range_stays_invalid_under_jit():
    jax = pytest.importorskip("jax")
    m, x, _ = linear_cache()
    x = {name: jax.numpy.asarray(np.repeat(a, 2, axis=0)) for name, a in x.items()}
    step = jax.jit(lambda cache, lengths: m.extend(cache, **x, lengths=lengths))
    out, cache = step(m.init_cache(**x), jax.numpy.asarray([2, 9]))
    assert np.isnan(out[1]).all()
    assert cache.length[0] == 2
    assert cache.length[1] < 0
    out, cache = step(cache, jax.numpy.asarray([1, 1]))
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[0]).all()
