"""Recurrences at the limits of their gates, strengths and keys.

Outputs, gradients and states of ordinary inputs are compared with their definitions in
`test_definitions.py`; those of extreme ones are compared with the same definitions here.
"""

import numpy as np
import pytest

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
from tests.mathematics.problems import Problem

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


def test_a_row_without_weights_is_zero_without_eps_and_so_is_its_gradient():
    m, p = pa.parse("elu1(linear[normalize=true,eps=0])"), Problem(s=4)
    out, pullback = m.vjp(**p.x(m), key_mask=np.asarray([[False, False, True, True]] * 2))
    gradients = pullback(np.ones_like(out))
    assert np.all(out[:, :2] == 0)
    assert np.all(gradients["q"][:, :2] == 0)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())


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


@pytest.mark.parametrize("text", ["gated_delta", "mlstm[eps=0.1]"])
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


def test_states_and_caches_that_do_not_fit_are_refused_by_name():
    m, x, cache = linear_cache()
    out, _, pullback = m.extend_vjp(cache, **x)
    with pytest.raises(ValueError, match=r"no buffer 'state'; it has linear.state\(k, v\)"):
        pullback(out, {"state": out})
    with pytest.raises(ValueError, match=r"cotangent of 'linear.state\(k, v\)' must have"):
        pullback(out, {"linear.state(k, v)": out})
    for wrong in (np.ones(3), [1.0], "state"):
        with pytest.raises(TypeError, match="cotangents of buffers must be a dict by buffer name"):
            pullback(out, wrong)
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


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_a_masked_key_is_masked_in_the_gradient_of_autograd_too(library):
    pytest.importorskip(library)
    base = pa.parse("retention")
    attn, inputs = pa.Bidirectional(base), Problem(s=7, n=2, group=2).x(base)
    seen = np.asarray([[True, False, True, True, False, True, True]] * 2)
    out, pullback = attn.vjp(**inputs, key_mask=seen)
    expected = pullback(np.ones_like(out))
    if library == "torch":
        import torch

        x = {name: torch.tensor(a, requires_grad=True) for name, a in inputs.items()}
        attn(**x, key_mask=torch.tensor(seen)).sum().backward()
        gradients = {name: a.grad.numpy() for name, a in x.items()}
    else:
        import jax

        with jax.enable_x64(True):
            x = {name: jax.numpy.asarray(a) for name, a in inputs.items()}
            masked = jax.numpy.asarray(seen)
            gradients = jax.grad(lambda x: attn(**x, key_mask=masked).sum())(x)
    for name, gradient in expected.items():
        np.testing.assert_allclose(np.asarray(gradients[name]), gradient, atol=1e-12)
