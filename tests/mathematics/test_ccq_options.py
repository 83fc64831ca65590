"""CCQ's options and text, and the gate that computes λ."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given

import precondattn as pa
from tests.mathematics.ccq_definition import (
    DeclaredProblem,
    assert_is,
    assert_output_and_gradients,
    in_torch,
    naive,
    problems,
    sampled,
    unit,
)
from tests.mathematics.identities import assert_close


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ccq(qk_norm)", r"the base normalises its queries, .* write ccq\[backbone_key=unit\]$"),
        ("ccq(qk_norm[norm=l2](delta))", r"normalises its queries, .* write ccq\(delta\)$"),
        ("ccq(lucid[normalize=queries_and_keys])", "the base normalises its queries"),
        ("ccq(ccq)", "the base normalises its queries"),
        ("ccq(softmax[causal=false])", "not causal"),
        ("ccq(differential)", "the first of two maps only"),
        ("ccq[covariance=decayed](linear)", "decay of the base, and the base has none"),
        ("ccq[covariance=decayed](delta)", "decay of the base, and the base has none"),
        ("temperature(ccq)", r"the base normalises its queries, .* write ccq\(temperature\)$"),
        ("per_dim_scale(ccq)", r"the base normalises its queries, .* ccq\(per_dim_scale\)$"),
        ("qk_norm(ccq)", "the base normalises its queries already"),
    ],
)
def test_compositions_that_make_no_sense_are_refused_with_the_reason(text, reason):
    with pytest.raises(TypeError, match=rf"makes no sense: .*{reason}"):
        pa.parse(text)


@pytest.mark.parametrize(
    "options",
    [
        {"tau": 2.0},
        {"tau": 2.0, "covariance": "decayed"},
        {"tau": 0.0, "covariance": "query_weighted"},
        {"covariance": "weighted"},
        {"backbone_key": "normalised"},
        {"eps": -1e-6},
    ],
)
def test_options_are_checked(options):
    with pytest.raises((TypeError, ValueError), match=f"ccq: .*{next(iter(options))}"):
        pa.CCQ(pa.GLA(), **options)


@pytest.mark.parametrize("base", ["gated_delta", "ssd"])
def test_a_decayed_covariance_needs_one_gate_for_each_query_head(base):
    p = DeclaredProblem(np.random.default_rng(0), t=4, n=2, values=2)
    running = pa.parse(f"ccq({base})")
    x = p.x(running)
    assert x["v"].shape[2] == 2 * x["q"].shape[2]
    running(**x)
    decayed = pa.parse(f"ccq[covariance=decayed]({base})")
    for call in (decayed, decayed.vjp):
        with pytest.raises(pa.ShapeError, match=r"decayed.*: (v|g|beta) is declared"):
            call(**x)


@pytest.mark.parametrize("wrong", [(2, 4), (2, 5, 4), (2, 4, 2), (2, 4, 4, 1), (1, 4, 4), ()])
def test_a_contraction_of_the_wrong_shape_is_refused_by_name(wrong):
    p = DeclaredProblem(np.random.default_rng(0), t=4, n=2, group=2)
    for layer in ("ccq(gla)", "ccq[covariance=query_weighted](linear)"):
        layer = pa.parse(layer)
        with pytest.raises(pa.ShapeError, match="contraction"):
            layer(**p.x(layer, contraction=np.ones(wrong)))


def test_a_missing_contraction_is_refused():
    p = DeclaredProblem(np.random.default_rng(0), t=4)
    layer = pa.parse("ccq(gla)")
    x = p.x(layer)
    del x["contraction"]
    with pytest.raises(TypeError, match="missing contraction"):
        layer(**x)


def gate(q, weight, bias, eps=1e-6):
    return torch.sigmoid(torch.einsum("bthd,hd->bth", unit(q, eps), weight) + bias)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@sampled
@given(p=problems())
def test_the_gate_is_the_logistic_of_a_linear_map(eps, p):
    layer = pa.ContractionGate(eps=eps)
    x = p.x(layer)

    def by(_, x):
        return gate(**x, eps=eps)

    assert_output_and_gradients(layer, p, x, by)
    out = pa.contraction_gate(**x, eps=eps)
    np.testing.assert_array_equal(out, layer(**x))
    assert np.all((out > 0) & (out < 1))


def test_the_gate_starts_at_a_tenth():
    x = DeclaredProblem(np.random.default_rng(0), t=3, n=2).x(pa.ContractionGate())
    out = pa.contraction_gate(x["q"], weight=0 * x["weight"], bias=np.full(2, np.log(0.1 / 0.9)))
    assert out.shape == x["q"].shape[:3]
    assert_close(out, np.full(out.shape, 0.1))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_saturated_gate_is_1_or_0_and_its_gradients_are_finite(sign):
    x = DeclaredProblem(np.random.default_rng(0), t=3, n=2).x(pa.ContractionGate())
    out, pullback = pa.ContractionGate().vjp(**(x | {"bias": np.full(2, sign * 1e4)}))
    assert_close(out, np.full(out.shape, (1 + sign) / 2), size=1)
    assert all(np.all(np.isfinite(gradient)) for gradient in pullback(0 * out + 1).values())


def test_gradients_flow_through_the_query_and_through_its_gate():
    """λ is computed from the query and then used by CCQ: q has a gradient along both paths."""
    p = DeclaredProblem(np.random.default_rng(0), t=6, n=2, group=2)
    layer, of_gate = pa.parse("ccq(gated_delta)"), pa.ContractionGate()
    x, gate_inputs = p.x(layer), p.x(of_gate)
    gate_inputs["q"] = x["q"]
    lam, gate_pullback = of_gate.vjp(**gate_inputs)
    out, pullback = layer.vjp(**(x | {"contraction": lam}))
    cotangent = p.like(out)
    gradients = pullback(cotangent)
    of_the_gate = gate_pullback(gradients["contraction"])
    leaves, weights = in_torch(x, requires_grad=True), in_torch(gate_inputs, requires_grad=True)
    through = gate(leaves["q"], weights["weight"], weights["bias"])
    expected = naive(layer, leaves | {"contraction": through})
    wanted = torch.autograd.grad(
        torch.sum(expected * torch.tensor(cotangent)),
        [leaves["q"], weights["weight"], weights["bias"]],
    )
    result = gradients["q"] + of_the_gate["q"], of_the_gate["weight"], of_the_gate["bias"]
    for actual, gradient in zip(result, wanted, strict=True):
        assert_is(actual, gradient)
