"""CCQ (arXiv 2606.01294), against identities that hold for any implementation.

The definition is q^c = (I − λ Σ) q̄ with q̄ and k̄ of length 1 and Σ the covariance of the keys so
far: unweighted, weighted by the base's decay, or by the softmax of the query. Everything is
float64, and an identity has to hold to 1e-10 of its largest number. The definition is written in
PyTorch, token by token; gradients are compared with its autograd and with central differences.
"""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from hypothesis import given, settings

import precondattn as pa
from tests.mathematics.ccq_definition import (
    DECAYED,
    LAYERS,
    PIECES,
    RUNNING,
    DeclaredProblem,
    assert_is,
    assert_output_and_gradients,
    conditioned,
    conditioned_for,
    in_torch,
    key_for,
    naive,
    problems,
    sampled,
)
from tests.mathematics.identities import assert_close

RECURRENT = [
    "ccq(linear)",
    "ccq(gla)",
    "ccq(ssd)",
    "ccq(gated_delta)",
    "ccq[covariance=decayed](gla)",
    "ccq[covariance=decayed](ssd)",
    "ccq[covariance=decayed](retention)",
    "ccq[covariance=decayed](gated_delta)",
    "ccq[covariance=query_weighted](gated_delta)",
    "ccq[covariance=query_weighted,tau=0.3](gla)",
    "ccq[backbone_key=raw](delta)",
    "ccq[backbone_key=unit](gla)",
    "ccq[covariance=decayed,eps=0.1](gated_delta)",
]


def definition(layer, x):
    """The base by its own implementation, on queries that the loop conditions."""
    given = {name: array for name, array in x.items() if name in layer.base.inputs}
    return layer.base(**given | {"q": conditioned_for(layer, x)[0], "k": key_for(layer, x["k"])})


@pytest.mark.parametrize("layer", LAYERS)
@sampled
@given(p=problems(square=False))
def test_the_base_gets_the_query_of_the_definition(layer, p):
    layer = pa.parse(layer)
    x = p.x(layer)
    assert_is(layer(**x), definition(layer, in_torch(x)))


@pytest.mark.parametrize("layer", LAYERS)
@settings(sampled, max_examples=3)
@given(p=problems(square=False, longest=5, kinds=["random", "clustered", "some zero"]))
def test_gradients_through_any_base(layer, p):
    layer = pa.parse(layer)
    assert_output_and_gradients(layer, p, p.x(layer), definition)


@pytest.mark.parametrize("layer", RECURRENT)
@sampled
@given(p=problems(square=False))
def test_output_and_gradients_are_those_of_the_loop(layer, p):
    layer = pa.parse(layer)
    assert_output_and_gradients(layer, p, p.x(layer), naive)


@pytest.mark.parametrize("layer", ["ccq(gated_delta)", "ccq[covariance=decayed](gla)"])
def test_a_longer_sequence_and_its_gradients(layer):
    layer, p = (
        pa.parse(layer),
        DeclaredProblem(np.random.default_rng(0), t=71, s=83, n=2, group=2, d=5),
    )
    assert_output_and_gradients(layer, p, p.x(layer), naive)


@pytest.mark.parametrize(("piece", "options"), PIECES, ids=str)
@sampled
@given(p=problems(square=False, kinds=["random", "equal", "clustered", "opposite"]))
def test_the_conditioned_query_and_its_gradient_are_those_of_the_definition(piece, options, p):
    def by(_, x):
        return conditioned(x, **options)[0]

    assert_output_and_gradients(piece, p, p.x(piece), by)


@pytest.mark.parametrize("layer", [*RUNNING[:6], "ccq(gla)", "ccq(gsa)", *DECAYED[2:]])
@sampled
@given(p=problems(square=False))
def test_query_heads_share_the_statistics_of_their_key_head(layer, p):
    layer = pa.parse(layer)
    x, shared = p.x(layer), [n for n, spec in layer.inputs.items() if "n" in spec.letters]
    assert "k" in shared
    repeated = x | {name: np.repeat(x[name], p.group, axis=2) for name in shared}
    assert_close(layer(**x), layer(**repeated), size=10 * (1 + np.abs(x["v"]).max()))


@pytest.mark.parametrize(
    ("layer", "unit_keys"),
    [
        ("ccq[eps=0.0](delta)", True),
        ("ccq[eps=0.0](gated_delta)", True),
        ("ccq[covariance=decayed,eps=0.0](gated_delta)", True),
        ("ccq[covariance=query_weighted,eps=0.0](delta)", True),
        ("ccq[eps=0.0](row_normalized(gated_delta))", True),
        ("ccq[backbone_key=unit,eps=0.0](gla)", True),
        ("ccq[backbone_key=unit,eps=0.0]", True),
        ("ccq[backbone_key=raw,eps=0.0](delta)", False),
        ("ccq[eps=0.0](gla)", False),
        ("ccq[eps=0.0](linear)", False),
        ("ccq[eps=0.0](ssd)", False),
        ("ccq[eps=0.0](retention)", False),
        ("ccq[eps=0.0]", False),
    ],
)
def test_keys_are_normalised_for_the_delta_rule_only(layer, unit_keys):
    p = DeclaredProblem(np.random.default_rng(0), t=6, n=2, group=2)
    layer = pa.parse(layer)
    x = p.x(layer)
    factors = p.rng.uniform(0.2, 3, size=(*x["k"].shape[:3], 1))
    difference = np.abs(layer(**(x | {"k": factors * x["k"]})) - layer(**x)).max()
    assert difference <= 1e-10 if unit_keys else difference > 1e-3


@pytest.mark.parametrize("layer", LAYERS)
@sampled
@given(p=problems(square=False, kinds=["random"]))
def test_the_length_of_a_query_does_not_matter(layer, p):
    layer = replace(pa.parse(layer), eps=0.0)
    x = p.x(layer)
    factors = p.rng.uniform(0.2, 3, size=(*x["q"].shape[:3], 1))
    out = layer(**x)
    assert_close(layer(**(x | {"q": factors * x["q"]})), out, size=1 + np.abs(out).max())


def test_ccq_inside_a_feature_map_conditions_its_features_and_outside_its_inputs():
    """Inside, features are computed from q^c; outside, the features of queries are conditioned."""
    p = DeclaredProblem(np.random.default_rng(0), t=6, n=2, group=2)
    outside = pa.parse("hedgehog(ccq(gla))")
    x = p.x(outside)
    features = {
        name: pa.HedgehogMap()(x[name], weight=x[f"{name}_weight"], bias=x[f"{name}_bias"])
        for name in "qk"
    }
    base_inputs = {name: x[name] for name in ("v", "g", "contraction")}
    scale = x["q"].shape[-1] ** -0.5
    for base in ("gla", f"gla[scale={scale}]"):
        expected = pa.parse(f"ccq({base})")(**features, **base_inputs)
        result = pa.parse(f"hedgehog(ccq({base}))")(**x)
        assert_close(result, expected, size=10)
