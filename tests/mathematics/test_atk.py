"""ATK against a loop over tokens in PyTorch, and against itself.

A = e^g A + β k ∘ k, m = x^{−r/(1+|r|)} with r = log(A + ε) − c; then the delta rule that writes
with m ∘ k and erases with k.
"""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
from tests.mathematics.linear_definitions import (
    LinearProblem,
    bare,
    close,
    of_heads,
    outer,
    tensors,
)

LAYERS = [
    "atk",
    "atk(delta)",
    "atk(kda)",
    "atk(gdn2)",
    "atk(comba)",
    "atk(comba[erases=decayed])",
    "atk[learned=true](kda)",
    "atk[bound=2,eps=0.01,center=0.5]",
    "atk[bound=1]",
]


def problem(layer, **sizes):
    """A problem, and all inputs of the layer."""
    p = LinearProblem(np.random.default_rng(0), **{"s": 7, "group": 2, "multiple": 2, **sizes})
    x = p.x(bare(layer))
    heads = x["k"].shape[:3]
    x |= {"g_atk": -(p.rng.normal(size=heads) ** 2), "beta_atk": p.rng.uniform(size=heads)}
    if layer.learned:
        x["log_atk_scale"] = p.rng.normal(size=heads[2:])
    return p, x


def scan(layer, x, states=None):
    """Outputs (b, t, u, e) and last states."""
    (b, s, h, d), (u, e) = x["k"].shape, x["v"].shape[2:]
    base, t = layer.base, x["q"].shape[1]
    squares, state = states or (torch.zeros(b, h, d).double(), torch.zeros(b, u, d, e).double())
    center = x["log_atk_scale"][:, None] if layer.learned else layer.center
    outs = []
    for j in range(s):
        k, weight = x["k"][:, j], x["beta_atk"][:, j, :, None]
        squares = torch.exp(x["g_atk"][:, j])[..., None] * squares + weight * k**2
        r = torch.log(squares + layer.eps) - center
        written = k * layer.bound ** (-r / (1 + r.abs()))
        written, erased = (of_heads(a[:, None], u)[:, 0] for a in (written, k))
        v, g = x["v"][:, j], x["g"][:, j] if "g" in x else torch.zeros(b, u).double()
        decayed = torch.exp(g if g.ndim == 3 else g[..., None])[..., None] * state
        if "p" in x:
            erased = of_heads(x["p"][:, j : j + 1], u)[:, 0]
        read = state if getattr(base, "erases", "") == "undecayed" else decayed
        beta = 1.0
        if "b" in x:
            erased, v = x["b"][:, j] * erased, x["w"][:, j] * v
        else:
            beta = x["beta"][:, j, :, None]
        known = (read * erased[..., None]).sum(-2)
        state = decayed + outer(written, beta * (v - known))
        if j >= s - t:
            q = of_heads(x["q"][:, j - s + t, None], u)[:, 0]
            outs.append(d**-0.5 * (state * q[..., None]).sum(-2))
    return torch.stack(outs, dim=1), (squares, state)


def expected_vjp(layer, x, d_out, states=None, d_last=()):
    x = tensors(x, grad=True)
    first = states and tuple(torch.tensor(a, requires_grad=True) for a in states)
    out, last = scan(layer, x, first)
    total = (out * torch.tensor(d_out)).sum()
    for state, cotangent in zip(last, d_last, strict=bool(d_last)):
        total = total + (state * torch.tensor(cotangent)).sum()
    leaves = {**x, **dict(enumerate(first or ()))}
    gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    gradients = {name: g.numpy() for name, g in zip(leaves, gradients, strict=True)}
    return out.detach().numpy(), last, gradients


@pytest.mark.parametrize("t", [7, 3])
@pytest.mark.parametrize("text", LAYERS)
def test_output_and_gradients_are_those_of_the_loop(text, t):
    layer = pa.parse(text)
    p, x = problem(layer, t=t)
    out, pullback = layer.vjp(**x)
    d_out = p.like(out)
    expected, _, gradients = expected_vjp(layer, x, d_out)
    close(out, expected)
    close(pullback(d_out), gradients)


@pytest.mark.parametrize("text", LAYERS)
def test_an_extension_continues_both_states_and_differentiates_them(text):
    layer = pa.parse(text)
    p, x = problem(layer)
    cache = layer.init_cache(**x)
    names = list(cache.store)
    assert "squares" in names[0]
    first = [p.like(array) for array in cache.store.values()]
    first[0] = np.abs(first[0])
    cache = cache._replace(store=dict(zip(names, first, strict=True)))
    out, last, pullback = layer.extend_vjp(cache, **x)
    d_out, d_last = p.like(out), [p.like(array) for array in first]
    expected, expected_last, gradients = expected_vjp(layer, x, d_out, tuple(first), d_last)
    close(out, expected)
    for name, array in zip(names, expected_last, strict=True):
        close(last.store[name], array.detach().numpy())
    result, d_first = pullback(d_out, dict(zip(names, d_last, strict=True)))
    close(result, {name: gradients.pop(name) for name in x})
    for name, gradient in zip(names, gradients.values(), strict=True):
        close(d_first[name], gradient)


@pytest.mark.parametrize("bound", [1.5, 2.0])
def test_the_factors_are_between_1_over_x_and_x_for_any_keys(bound):
    rng = np.random.default_rng(0)
    k = rng.normal(size=(1, 50, 2, 4)) * rng.choice([0.0, 1e-30, 1.0, 1e30], size=(1, 50, 1, 1))
    g = rng.choice([0.0, -1.0, -50.0], size=(1, 50, 2))
    out = pa.PreconditionedKey(bound=bound)(k, g_atk=g, beta_atk=np.ones_like(g))
    factors = out[k != 0] / k[k != 0]
    assert np.all(factors >= 1 / bound)
    assert np.all(factors <= bound)


@pytest.mark.parametrize("text", ["gated_delta", "kda"])
def test_with_a_constant_a_the_key_that_is_written_is_rescaled(text):
    """Without decay and weights A stays as it is, and m is the same for all tokens."""
    layer = pa.ATK(pa.parse(text))
    p, x = problem(layer)
    x |= {"g_atk": 0 * x["g_atk"], "beta_atk": 0 * x["beta_atk"]}
    cache = layer.init_cache(**x)
    squares = next(iter(cache.store))
    a = np.abs(p.like(cache.store[squares]))
    out, _ = layer.extend(cache._replace(store=cache.store | {squares: a}), **x)
    r = np.log(a + layer.eps) - layer.center
    m = layer.bound ** (-r / (1 + np.abs(r)))
    del x["g_atk"], x["beta_atk"]
    rule = pa.parse(f"erasing_{text}")
    close(out, rule(**x | {"k": m[:, None] * x["k"]}, erase=x["k"]))


def test_a_rule_that_writes_with_a_shorter_key_reads_a_shorter_query():
    rule = pa.ErasingGatedDelta()
    x = LinearProblem(np.random.default_rng(0), s=6, group=2, multiple=2).x(pa.GatedDelta())
    written = rule(**x | {"k": 0.7 * x["k"]}, erase=x["k"])
    close(written, rule(**x | {"q": 0.7 * x["q"]}, erase=0.7 * x["k"]))


@pytest.mark.parametrize("text", ["delta", "gated_delta", "kda", "gdn2"])
def test_a_rule_that_erases_what_it_writes_is_the_rule_without_an_erase_key(text):
    layer = pa.parse(text)
    x = LinearProblem(np.random.default_rng(0), s=6, group=2, multiple=2).x(layer)
    close(pa.parse(f"erasing_{text}")(**x, erase=x["k"]), layer(**x))


@pytest.mark.parametrize("text", ["atk(linear)", "atk(qk_norm[norm=l2](delta))", "atk(softmax)"])
def test_bases_without_a_key_to_erase_are_refused(text):
    with pytest.raises(TypeError, match="makes no sense: it changes the key that a delta rule"):
        pa.parse(text)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"bound": 0.5}, "bound must be 1 or more"), ({"learned": True, "center": 0.0}, "center is")],
)
def test_options_that_exclude_each_other_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        pa.ATK(**options)


def test_the_gradient_of_a_zero_key_under_a_norm_is_that_of_a_small_enough_difference():
    """The norm has the slope 1/√ε there, and the squares of its result are compared with ε."""
    layer = pa.parse("ccq(atk)")
    p, x = problem(pa.ATK(), multiple=1)
    x |= {"k": x["k"] * (np.arange(7) % 3 > 0)[:, None, None]}
    x["contraction"] = p.rng.uniform(size=x["q"].shape[:3])
    out, pullback = layer.vjp(**x)
    d_out, direction = p.like(out), p.like(x["k"])
    expected = np.sum(pullback(d_out)["k"] * direction)
    above, below = (
        np.sum(d_out * layer(**x | {"k": x["k"] + h * direction})) for h in (1e-9, -1e-9)
    )
    assert abs((above - below) / 2e-9 - expected) < 1e-6 * abs(expected)


def test_the_gradient_of_an_almost_empty_state_is_that_of_a_small_enough_difference():
    """A feature map leaves such channels: the logarithm is curved over the distance ε."""
    layer, (p, x) = pa.ATK(), problem(pa.ATK(), multiple=1)
    empty = layer.init_cache(**x)
    (name,) = (name for name in empty.store if "squares" in name)
    direction = p.rng.uniform(0.5, 1, size=empty.store[name].shape)

    def run(distance):
        squares = 1e-8 + distance * direction
        return layer.extend_vjp(empty._replace(store={**empty.store, name: squares}), **x)

    out, _, pullback = run(0.0)
    d_out = p.like(out)
    expected = np.sum(pullback(d_out)[1][name] * direction)
    above, below = (np.sum(d_out * run(h)[0]) for h in (1e-9, -1e-9))
    assert abs((above - below) / 2e-9 - expected) < 1e-5 * abs(expected)
