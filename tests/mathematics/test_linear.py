"""Linear attention and its gated variants, slots and feature maps, against identities that hold for
any implementation.

The definition is a loop over tokens (`linear_definitions.py`). Everything is float64 and has to
hold to 1e-10 of the largest number involved.
"""

import re

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.linear_definitions import (
    GATED,
    LAYERS,
    OWN,
    SHAPES,
    LinearProblem,
    alone,
    bare,
    close,
    close_to_definition,
    expected_vjp,
    features,
    of_tokens,
    problems,
    sampled,
    tensors,
    timed,
)

# Outputs and gradients


@pytest.mark.parametrize("layer", LAYERS)
@sampled
@given(p=problems(square=False))
def test_outputs_and_gradients_are_those_of_the_definition(layer, p):
    layer = pa.parse(layer)
    close_to_definition(layer, p, p.x(layer))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("t", [1, 70, 131])
def test_long_sequences_are_those_of_the_definition(layer, t):
    layer = pa.parse(layer)
    p = LinearProblem(np.random.default_rng(t), s=131, t=t, n=1, group=2, multiple=2, d=5, e=3)
    close_to_definition(layer, p, p.x(layer))


def parallel(layer, x):
    """The output of one head from matrices: q, k (s, d), v (s, e), gates (s, ·), beta (s,)."""
    q, k, v = x["q"], x["k"], x["v"]
    s, d = q.shape
    lower = np.tril(np.ones((s, s)))
    decay = np.exp(np.cumsum(x.get("g", np.zeros(s)), axis=0))
    decay = decay[:, None] / decay[None]
    scale = d**-0.5 if layer.scale is None else layer.scale
    if layer.name == "gsa":
        decay = decay * lower[..., None]
        slots = scale * np.einsum("ic,jc,ijm,jm->im", q, k, decay, x["s"])
        weights = np.exp(slots - slots.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("im,ijm,jm,je->ie", weights, decay, x["s"], v)
    if layer.name == "mlstm":
        total = np.cumsum(x["g"])
        logs = np.where(lower, total[:, None] - total + x["i"], -np.inf)
        maximum = logs.max(-1, keepdims=True)
        weights = scale * (q @ k.T) * np.exp(logs - maximum)
        mass = np.maximum(np.abs(weights.sum(-1, keepdims=True)), np.exp(-maximum))
        return weights @ v / (mass + layer.eps)
    if layer.name == "rwkv6":
        before = np.exp(-x["g"])[:, None] * decay
        a = np.einsum("ic,jc,ijc->ij", q, k, before) * np.tril(lower, -1)
        return scale * (a + np.diag((q * x["u"] * k).sum(-1))) @ v
    if layer.name == "gla":
        return scale * np.einsum("ic,jc,ijc,ij->ij", q, k, decay, lower) @ v
    if "beta" in x and decay.ndim == 3:
        scores, known = (np.einsum("ic,jc,ijc->ij", a, k, decay) for a in (q, x.get("p", k)))
        known = x["beta"][:, None] * np.tril(known, -1)
        v = np.linalg.solve(np.eye(s) + known, x["beta"][:, None] * v)
        return scale * (lower * scores) @ v
    if layer.name == "gdn2":
        scores, known = (np.einsum("ic,jc,ijc->ij", a, k, decay) for a in (q, x["b"] * k))
        v = np.linalg.solve(np.eye(s) + np.tril(known, -1), x["w"] * v)
        return scale * (lower * scores) @ v
    if layer.name == "retention":
        decay = (1 - 2.0**-5) ** (np.arange(s)[:, None] - np.arange(s))
    if "beta" in x:
        known = decay * (x.get("p", k) @ k.T)
        if getattr(layer, "erases", None) == "undecayed":
            known = np.exp(-x["g"])[:, None] * known
        known = x["beta"][:, None] * np.tril(known, -1)
        v = np.linalg.solve(np.eye(s) + known, x["beta"][:, None] * v)
    return scale * (lower * decay * (q @ k.T)) @ v


@pytest.mark.parametrize("layer", [name for name in SHAPES if name != "dplr"])
@sampled
@given(p=problems(heads=1))
def test_outputs_are_those_of_the_parallel_form(layer, p):
    layer = pa.parse(layer)
    p.sizes |= {"n": 1, "h": 1, "u": 1}
    x = p.x(layer)
    out = layer(**x)
    for b in range(2):
        one = {name: a[b, :, 0] if timed(name) else a[0] for name, a in x.items()}
        close(out[b, :, 0], parallel(layer, one))


@pytest.mark.parametrize("layer", LAYERS)
def test_torch_differentiates_a_call(layer):
    layer, p = (
        pa.parse(layer),
        LinearProblem(np.random.default_rng(1), s=6, t=4, group=2, multiple=2),
    )
    x = p.x(layer)
    inputs = tensors(x, grad=True)
    out = layer(**inputs)
    d_out = p.like(out)
    result = torch.autograd.grad((out * torch.tensor(d_out)).sum(), list(inputs.values()))
    expected, _, gradients, _ = expected_vjp(layer, x, d_out)
    close(out.detach().numpy(), expected)
    close({name: g.numpy() for name, g in zip(inputs, result, strict=True)}, gradients)


# Gates and keys at their limits


@pytest.mark.parametrize("layer", GATED)
@pytest.mark.parametrize(
    "gates",
    [[0.0], [-50.0], [-1e6], [0.0, -1e6], [-1e-3, -1e6, -1e9], [0.0, -1e-4, -1.0, -50.0, -1e6]],
)
def test_gates_may_be_open_or_closed_or_mixed(layer, gates):
    layer = pa.parse(layer)
    p = LinearProblem(np.random.default_rng(len(gates)), s=75, group=2, multiple=2, d=3)
    x = p.x(layer)
    x["g"] = p.rng.choice(gates, size=x["g"].shape)
    close_to_definition(layer, p, x)
    close_to_definition(layer, p, x, p.states(layer.init_cache(**x)))


@pytest.mark.parametrize("layer", GATED)
@pytest.mark.parametrize("border", [3, 64, 70])
def test_a_nearly_closed_gate_costs_later_outputs_no_accuracy(layer, border):
    """Values of 1e15 before the gate are of size 1e-7 after it; other outputs stay accurate."""
    layer = pa.parse(layer)
    p = LinearProblem(np.random.default_rng(border), s=75, group=2, multiple=2, d=3)
    x = p.x(layer)
    x["g"] /= 10
    x["g"][:, border] = -50
    x["v"][:, :border] *= 1e15
    out, pullback = layer.vjp(**x)
    d_out = p.like(out)
    expected, _, expected_gradients, _ = expected_vjp(layer, x, d_out)
    close(out[:, border:], expected[:, border:])
    for name, gradient in pullback(d_out).items():
        close(gradient[:, border:], expected_gradients[name][:, border:])


@pytest.mark.parametrize("layer", GATED)
@pytest.mark.parametrize("border", [3, 64, 70])
def test_a_nearly_closed_gate_costs_earlier_gradients_no_accuracy(layer, border):
    """Cotangents of 1e15 after the gate are about 1e-7 before it; other gradients stay accurate."""
    layer = pa.parse(layer)
    p = LinearProblem(np.random.default_rng(border), s=75, group=2, multiple=2, d=3)
    x = p.x(layer)
    x["g"] /= 10
    x["g"][:, border] = -50
    out, pullback = layer.vjp(**x)
    d_out = p.like(out)
    d_out[:, border:] *= 1e15
    _, _, expected, _ = expected_vjp(layer, x, d_out)
    for name, gradient in pullback(d_out).items():
        close(gradient[:, :border], expected[name][:, :border])


@pytest.mark.parametrize("layer", ["linear", "retention", "ssd", "gla", "gsa"])
def test_equal_keys_and_zero_keys_give_the_output_of_the_definition(layer):
    layer, p = pa.parse(layer), LinearProblem(np.random.default_rng(0), s=70, group=2, multiple=2)
    x = p.x(layer)
    x["k"][:, 10:40] = x["k"][:, :1]
    x["k"][:, 30:] *= (np.arange(40) % 2)[:, None, None]
    close_to_definition(layer, p, x)
    close_to_definition(layer, p, x, p.states(layer.init_cache(**x)))


# Identities between mechanisms


@sampled
@given(problems(square=False))
def test_open_gates_equal_no_gates(p):
    delta, gated = pa.Delta(), pa.GatedDelta()
    x = p.x(gated)
    x["g"] = 0 * x["g"]
    close(gated(**x), delta(**{name: a for name, a in x.items() if name != "g"}))
    x = p.x(pa.GLA())
    plain = pa.Linear()(x["q"], x["k"], x["v"])
    close(pa.GLA()(**(x | {"g": 0 * x["g"]})), plain)
    k, v = (np.repeat(x[name], p.group, axis=2) for name in "kv")
    close(pa.SSD(scale=None)(x["q"], k, v, g=np.zeros(k.shape[:3])), plain)


@sampled
@given(problems(square=False))
def test_hgrn2_is_gla_whose_keys_are_what_its_gates_forget(p):
    """The gradient, which has one more term, and outputs after a cache are compared too."""
    x = p.x(pa.GLA())
    del x["k"]
    keys = {"k": -np.expm1(x["g"])}
    for backend in ("reference", "portable"):
        out, pullback = pa.HGRN2().vjp(**x, backend=backend)
        expected, expected_pullback = pa.GLA().vjp(**x, **keys, backend="reference")
        close(out, expected)
        d_out = p.like(out)
        d, expected_d = pullback(d_out), expected_pullback(d_out)
        expected_d["g"] = expected_d["g"] - np.exp(x["g"]) * expected_d.pop("k")
        assert d.keys() == expected_d.keys()
        for name, gradient in d.items():
            close(gradient, expected_d[name])
    if p.sizes["t"] == p.sizes["s"]:
        first, cache = pa.HGRN2().extend(pa.HGRN2().init_cache(**x), **of_tokens(x, slice(0, 1)))
        last, cache = pa.HGRN2().extend(cache, **of_tokens(x, slice(1, None)))
        close(np.concatenate([first, last], axis=1), expected)


@sampled
@given(problems(square=False))
def test_rwkv6_is_gla_of_grown_queries_less_its_own_term(p):
    """Queries that grow by e^{−g} undo the decay of their token; extreme gates would overflow."""
    x = p.x(pa.RWKV6(scale=1.0))
    u, t = x.pop("u"), p.sizes["t"]
    k, v, g = (np.repeat(x[name], p.group, axis=2)[:, -t:] for name in "kvg")
    grown = x["q"] * np.exp(-g)
    own = ((x["q"] * u - grown) * k).sum(-1, keepdims=True) * v
    close(pa.RWKV6(scale=1.0)(**x, u=u), pa.GLA(scale=1.0)(**(x | {"q": grown})) + own)


@sampled
@given(problems(square=False))
def test_rwkv6_without_a_bonus_does_not_read_its_own_token(p):
    layer = pa.RWKV6()
    x = p.x(layer) | {"u": np.zeros((p.sizes["h"], p.sizes["d"]))}
    other = {name: x[name].copy() for name in "kvg"}
    for array in other.values():
        array[:, -1] *= 3
    np.testing.assert_array_equal(layer(**(x | other))[:, -1], layer(**x)[:, -1])


@sampled
@given(problems(square=False))
def test_one_gate_for_all_channels_is_that_of_ssd(p):
    x = p.x(pa.GLA())
    gate = x["g"][..., 0]
    out = pa.GLA()(**(x | {"g": np.repeat(gate[..., None], p.sizes["d"], axis=-1)}))
    k, v, g = (np.repeat(a, p.group, axis=2) for a in (x["k"], x["v"], gate))
    close(out, pa.SSD(scale=p.sizes["d"] ** -0.5)(x["q"], k, v, g=g))


@sampled
@given(problems(square=False))
def test_one_gate_for_all_channels_is_that_of_the_gated_delta_rule(p):
    """Its gradient is then the sum of those of the channels."""
    x = p.x(pa.GatedDelta())
    channels = np.repeat(x["g"][..., None], p.sizes["d"], axis=-1)
    expected, expected_pullback = pa.GatedDelta().vjp(**x)
    out, pullback = pa.KDA().vjp(**(x | {"g": channels}))
    close(out, expected)
    d_out = p.like(out)
    gradients = pullback(d_out)
    close(gradients | {"g": gradients["g"].sum(-1)}, expected_pullback(d_out))


@sampled
@given(problems(square=False))
def test_gdn2_that_erases_and_writes_equally_in_all_channels_is_kda(p):
    """The gradient of β is then the sum of those of b and w."""
    x = p.x(pa.KDA())
    beta = x.pop("beta")
    b = np.repeat(beta[..., None], p.sizes["d"], axis=-1)
    w = np.repeat(beta[..., None], p.sizes["e"], axis=-1)
    out, pullback = pa.GDN2().vjp(**x, b=b, w=w)
    expected, expected_pullback = pa.KDA().vjp(**x, beta=beta)
    close(out, expected)
    d_out = p.like(out)
    gradients = pullback(d_out)
    gradients["beta"] = gradients.pop("b").sum(-1) + gradients.pop("w").sum(-1)
    close(gradients, expected_pullback(d_out))


@sampled
@given(problems(square=False))
def test_dplr_that_reads_a_decayed_key_and_takes_it_away_is_kda(p):
    x = p.x(pa.KDA())
    heads = p.sizes["u"]
    q, k = (np.repeat(x[name], p.multiple, axis=2) for name in "qk")
    beta, a = x["beta"][..., None], np.exp(x["g"]) * k
    out = pa.DPLR()(q, k, beta * x["v"], a=a, b=-beta * k, g=x["g"])
    assert out.shape[2] == heads
    close(out, pa.KDA()(**x))


@sampled
@given(problems(square=False))
def test_dplr_with_one_gate_for_all_channels_is_comba_that_writes_what_it_takes_away(p):
    x = p.x(pa.Comba())
    q, k, a = (np.repeat(x[name], p.multiple, axis=2) for name in "qkp")
    beta, g = x["beta"][..., None], np.repeat(x["g"][..., None], p.sizes["d"], axis=-1)
    close(pa.DPLR()(q, k, beta * x["v"], a=a, b=-beta * k, g=g), pa.Comba()(**x))


@pytest.mark.parametrize("erases", ["decayed", "undecayed"])
@sampled
@given(p=problems(square=False))
def test_comba_that_erases_the_key_it_writes_is_the_gated_delta_rule(erases, p):
    """The undecayed state holds e^{−g} of what the decayed one does."""
    x = p.x(pa.GatedDelta())
    # Query heads share the gates of their value heads, so that one p suits all of them.
    x["g"] = np.repeat(x["g"][:, :, :: p.multiple], p.multiple, axis=2)
    factor = 1 if erases == "decayed" else np.exp(x["g"])[:, :, :: p.multiple, None]
    out, pullback = pa.Comba(erases=erases).vjp(**x, p=factor * x["k"])
    expected, expected_pullback = pa.GatedDelta().vjp(**x)
    close(out, expected)
    d_out = p.like(out)
    gradients = pullback(d_out)
    gradients["k"] += factor * gradients.pop("p")
    expected = expected_pullback(d_out)
    if erases == "undecayed":  # There, p depends on g.
        gradients.pop("g"), expected.pop("g")
    close(gradients, expected)


@sampled
@given(problems(square=False))
def test_retention_is_ssd_with_a_constant_gate(p):
    x = p.x(pa.Retention())
    k, v = (np.repeat(x[name], p.group, axis=2) for name in "kv")
    g = np.broadcast_to(np.log1p(-(2.0 ** (-5 - np.arange(k.shape[2])))), k.shape[:3]).copy()
    close(pa.Retention()(**x), pa.SSD(scale=None)(x["q"], k, v, g=g))


@sampled
@given(problems(square=False))
def test_ssd_without_a_scale_is_ssd_by_the_root_of_d(p):
    x = p.x(pa.SSD())
    close(pa.SSD()(**x), np.sqrt(p.sizes["d"]) * pa.SSD(scale=None)(**x))


@pytest.mark.parametrize("map", ["elu1", "hedgehog"])
@sampled
@given(p=problems(square=False))
def test_a_normalised_read_is_a_mean_under_the_features(map, p):
    layer = pa.parse(f"{map}(linear[normalize=true,eps=0])")
    x = p.x(layer)
    _, mapped = features(layer, tensors(x))
    q, k = mapped["q"].numpy(), np.repeat(mapped["k"].numpy(), p.group, axis=2)
    t, s = q.shape[1], k.shape[1]
    weights = np.tril(np.ones((t, s)), s - t) * np.einsum("bthd,bshd->bhts", q, k)
    weights /= weights.sum(-1, keepdims=True)
    assert np.all(weights >= 0)
    values = np.repeat(x["v"], p.group, axis=2)
    close(layer(**x), np.einsum("bhts,bshe->bthe", weights, values))
    constant = np.broadcast_to(x["v"][:, :1], x["v"].shape).copy()
    expected = np.repeat(constant[:, :1], p.group, axis=2)
    close(layer(**(x | {"v": constant})), np.broadcast_to(expected, (2, t, *expected.shape[2:])))


def test_eps_is_added_to_the_sum_of_the_scaled_weights():
    q = k = np.full((1, 3, 1, 1), 2.0)
    v = np.asarray([3.0, 5.0, 7.0]).reshape(1, 3, 1, 1)
    out = pa.Linear(scale=0.5, normalize=True, eps=0.25)(q, k, v)
    expected = [2 * 3 / 2.25, 2 * 8 / 4.25, 2 * 15 / 6.25]
    close(out.ravel(), np.asarray(expected))


def test_a_row_without_weights_is_zero_without_eps_and_so_is_its_gradient():
    layer, p = (
        pa.parse("elu1(linear[normalize=true,eps=0])"),
        LinearProblem(np.random.default_rng(0), s=4),
    )
    x, is_visible = p.x(layer), np.asarray([[False, False, True, True]] * 2)
    out, pullback = layer.vjp(**x, key_mask=is_visible)
    gradients = pullback(np.ones_like(out))
    assert np.all(out[:, :2] == 0)
    assert np.all(gradients["q"][:, :2] == 0)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())


@pytest.mark.parametrize("per", ["layer", "head"])
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("base", ["gla", "linear", "gated_delta", "gsa"])
@sampled
@given(p=problems(square=False))
def test_hedgehog_is_its_base_on_its_features(base, factor, per, p):
    layer = pa.parse(f"hedgehog[factor={factor},per={per}]({base})")
    x = p.x(layer)
    mapped = dict(x)
    for name in "qk":
        weight, bias = mapped.pop(f"{name}_weight"), mapped.pop(f"{name}_bias")
        y = factor * ((weight @ x[name][..., None])[..., 0] + bias)
        exponents = np.concatenate([y, -y], axis=-1)
        features = np.exp(exponents - exponents.max(-1, keepdims=True))
        mapped[name] = features / features.sum(-1, keepdims=True)
    close(layer(**x), pa.parse(base)(**mapped))


@pytest.mark.parametrize(("text", "total"), [("hedgehog(linear)", 1), ("elu1(linear)", None)])
@sampled
@given(p=problems(longest=1))
def test_features_are_positive_and_those_of_hedgehog_sum_to_one(text, total, p):
    """A state of one token and a value of 1 is the features of its key."""
    layer = pa.parse(text)
    x = p.x(layer)
    x["v"] = np.ones_like(x["v"])
    _, cache = layer.extend(layer.init_cache(**x), **x)
    (state,) = cache.store.values()
    assert np.all(state > 0)
    if total is not None:
        close(state.sum(2), np.ones(state.sum(2).shape))


@pytest.mark.parametrize("base", ["linear", "gla", "delta", "gated_delta", "gsa", "retention"])
@sampled
@given(p=problems(square=False), eps=st.sampled_from([0.0, 1e-6, 0.5]))
def test_an_l2_norm_normalises_queries_and_keys_to_unit_rows(base, p, eps):
    layer = pa.parse(f"qk_norm[norm=l2,eps={eps}]({base})")
    x = p.x(layer)
    x["k"] = 3 * x["k"]
    normed = {n: x[n] / np.sqrt((x[n] ** 2).sum(-1, keepdims=True) + eps) for n in "qk"}
    close(layer(**x), pa.parse(base)(**(x | normed)))
    if eps == 0:
        close(layer(**(x | {"q": 7 * x["q"], "k": 0.1 * x["k"]})), layer(**x))


@sampled
@given(problems(square=False))
def test_one_slot_is_a_gated_sum_that_does_not_depend_on_the_query(p):
    p.sizes["m"] = 1
    x = p.x(pa.GSA())
    one = np.ones_like(x["s"])
    summed = pa.GLA(scale=1.0)(one[:, -p.sizes["t"] :], one, x["s"] * x["v"], g=x["g"])
    close(pa.GSA()(**x), np.repeat(summed, p.group, axis=2))


@sampled
@given(problems(square=False))
def test_slots_are_two_gated_reads(p):
    """The first reads one slot after another; its softmax over slots is the query of the second."""
    layer = pa.GSA(scale=0.6)
    x = p.x(layer)
    k, v, s, g = (np.repeat(x[name], p.group, axis=2) for name in "kvsg")
    slots = [
        pa.SSD(scale=0.6)(x["q"], k, s[..., m, None], g=g[..., m]) for m in range(p.sizes["m"])
    ]
    logits = np.concatenate(slots, axis=-1)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    close(layer(**x), pa.GLA(scale=1.0)(weights, s, v, g=g))


@pytest.mark.parametrize("layer", LAYERS)
@sampled
@given(p=problems(square=False))
def test_outputs_are_linear_in_values(layer, p):
    layer = pa.parse(layer)
    x = p.x(layer)
    other = p.like(x["v"])
    mixed = layer(**(x | {"v": 2 * x["v"] - 3 * other}))
    close(mixed, 2 * layer(**x) - 3 * layer(**(x | {"v": other})))


# Time, batch and heads


def of_head(layer, p, x, head):
    """The inputs that belong to one key head, and the indices of its output heads."""
    letters = SHAPES[bare(layer).name]
    per_query_head = letters["k"] == OWN["k"]
    counts = {"h": 1 if per_query_head else p.group, "n": 1, "u": p.multiple}
    chosen = {letter: slice(head * count, head * count + count) for letter, count in counts.items()}
    result = dict(x)
    for name, array in x.items():
        if timed(name):
            result[name] = array[:, :, chosen[letters[name].split()[2]]]
        elif name == "u":
            result[name] = array[chosen["h"]]
        elif layer.per == "head":
            result[name] = array[chosen[letters[name[0]].split()[2]]]
    return result, chosen["u" if per_query_head else "h"]


@pytest.mark.parametrize("layer", LAYERS)
@sampled
@given(p=problems(square=False))
def test_sequences_and_heads_are_independent(layer, p):
    """Retention's decay depends on the index of a head, so only its first head is compared."""
    layer = pa.parse(layer)
    x, base = p.x(layer), bare(layer).name
    out = layer(**x)
    for i in range(p.sizes["b"]):
        close(out[i : i + 1], layer(**alone(x, i, slice(None))))
    for head in range(1 if base == "retention" else x["k"].shape[2]):
        one, outs = of_head(layer, p, x, head)
        close(out[:, :, outs], layer(**one))


# Refusals


@pytest.mark.parametrize(
    "text",
    [
        "laser(linear)",
        "laser(gated_delta)",
        "lucid(linear)",
        "lucid(gla)",
        "elu1(delta)",
        "elu1(gated_delta)",
        "elu1(kda)",
        "qk_norm(delta)",
        "qk_norm[norm=layer](gated_delta)",
        "qk_norm[norm=l2,gain=true](delta)",
        "hedgehog(hedgehog)",
        "hedgehog(hedgehog(gla))",
    ],
)
def test_compositions_that_make_no_sense_are_refused(text):
    with pytest.raises(TypeError, match=rf"^{re.escape(text)} makes no sense: "):
        pa.parse(text)


def test_eps_without_normalisation_is_refused():
    with pytest.raises(ValueError, match="eps"):
        pa.parse("linear[eps=0.1]")
    assert pa.parse("linear[normalize=true,eps=0.1]").eps == 0.1


@pytest.mark.parametrize(
    ("layer", "name", "shape"),
    [
        ("gla", "g", (2, 5, 2, 4)),
        ("hedgehog(gla)", "g", (2, 5, 2, 3)),
        ("rwkv6", "u", (2, 3)),
        ("gsa", "s", (2, 5, 2, 5)),
        ("gsa", "g", (2, 5, 2)),
        ("linear", "k", (2, 5, 3, 3)),
        ("ssd", "v", (2, 5, 6, 2)),
        ("delta", "v", (2, 5, 6, 2)),
        ("ssd", "k", (2, 5, 2, 3)),
        ("ssd", "g", (2, 5, 4)),
        ("delta", "beta", (2, 5, 8, 1)),
        ("gated_delta", "beta", (2, 5, 4)),
        ("kda", "g", (2, 5, 8)),
        ("kda", "g", (2, 5, 4, 3)),
        ("gdn2", "b", (2, 5, 8)),
        ("gdn2", "w", (2, 5, 8, 3)),
        ("comba", "p", (2, 5, 8, 3)),
        ("hedgehog[per=head](linear)", "k_weight", (4, 3, 3)),
        ("hedgehog(linear)", "q_bias", (6,)),
    ],
)
def test_a_wrong_shape_is_refused_by_name(layer, name, shape):
    layer, p = (
        pa.parse(layer),
        LinearProblem(np.random.default_rng(0), s=5, n=2, group=2, multiple=2),
    )
    x = p.x(layer)
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        layer(**(x | {name: np.zeros(shape)}))
