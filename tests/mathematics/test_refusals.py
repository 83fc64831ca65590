"""Compositions, options and calls that have no meaning, and the words that say why.

Wrong shapes, dtypes and libraries of the inputs of any mechanism are refused in `tests/core`.
"""

import re

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.problems import Problem

COMPOSITIONS = [
    ("row_normalized(row_normalized)", "the base's rows have length 1 already"),
    ("laser(row_normalized)", "laser needs a base that reads a mean of its values"),
    ("row_normalized[axis=channel]", "over all tokens, and the base is causal"),
    ("temperature(qk_norm)", r"normalises its queries, .*; write qk_norm\(temperature\)$"),
    (
        "temperature(lucid[normalize=queries_and_keys])",
        r"normalises .*; write lucid\[normalize=queries_and_keys\]\(temperature\)$",
    ),
    ("per_dim_scale(qk_norm)", r"normalises its queries, .*; write qk_norm\(per_dim_scale\)$"),
    ("qk_norm(qk_norm)", "the base normalises its queries already"),
    ("qk_norm(lucid[normalize=queries_and_keys])", "the base normalises its queries already"),
    ("lucid[normalize=queries_and_keys](qk_norm)", "the base would change it again"),
    ("temperature(temperature)", "tau is an input of temperature already"),
    ("differential(differential)", "two maps already, with q2, k2"),
    ("laser(differential)", "laser needs a base that reads a mean of its values"),
    ("lucid(differential)", "lucid needs a base that exponentiates a score function"),
    ("temperature(differential)", r"would reach .*, k2; write differential\(temperature\)$"),
    ("differential[paired=q/w]", "paired names w, and the base takes q, k, v"),
    ("laser(softmax[sink=true])", "weights that sum to one"),
    ("row_normalized(softmax[sink=true])", "sink scales every row of its output"),
    ("laser(softmax[read=mean_and_log_sum])", "weights that sum to one"),
    ("differential(softmax[read=mean_and_log_sum])", "logarithm"),
    ("lucid(windowed)", "without causality, lucid needs one score"),
    ("ccq(qk_norm)", r"the base normalises its queries, .* write ccq\[backbone_key=unit\]$"),
    ("ccq(lucid[normalize=queries_and_keys])", "the base normalises its queries"),
    ("ccq(softmax[causal=false])", "not causal"),
    ("ccq(differential)", "the first of two maps only"),
    ("ccq[covariance=decayed](linear)", "decay of the base, and the base has none"),
    ("temperature(ccq)", r"the base normalises its queries, .* write ccq\(temperature\)$"),
    ("laser(outlook)", "reads a mean of its values"),
    ("lucid(outlook)", "windows, landmarks and channels have none"),
    ("qk_norm(outlook)", "it changes k, q, and outlook takes logits, v"),
    ("differential(outlook)", r"takes logits, v; write differential\[paired=logits\]\(outlook\)"),
    ("lucid(cross_covariance)", "one score for each pair of tokens"),
    ("laser(cross_covariance)", "takes means over channels, and laser needs one over tokens"),
    ("laser(nystrom)", "non-negative weights that sum to one"),
    ("lucid[metric=dot]", r"path transports keys, .* none; write lucid"),
    ("lucid[rho=0.1]", "rho belong"),
    ("lucid[tolerance=0.1,iterations=3]", "tolerance and iterations belong"),
    ("lucid[beta=true](softmax[causal=false])", "no order in which values are written"),
    ("lucid[normalize=rows](softmax[causal=false])", "needs a unit diagonal"),
    ("lucid(softmax[causal=false,window=3])", "indefinite"),
    ("bidirectional(gsa)", "no linear function of its state"),
    ("bidirectional(linear[normalize=true])", "is a quotient.*by that for values of 1"),
    ("bidirectional(delta_product)", "a token of the base has several keys and values"),
    ("bidirectional(lucid)", "its base is a recurrence"),
    ("bidirectional(softmax[causal=false])", "reads tokens on both sides already"),
    ("bidirectional(qk_norm[norm=l2](kda))", "write qk_norm.norm=l2..bidirectional.kda"),
    ("ccq(bidirectional)", "its covariance is that of the keys so far"),
    ("mesa(bidirectional)", "its regression is that of the keys so far"),
    ("stable_step(softmax)", "shortens the steps of a delta rule"),
    ("stable_step(comba)", "erases along another key than it writes"),
    ("stable_step(delta_product)", "has several keys"),
    ("stable_step(ccq(delta))", r"write ccq\(stable_step\(delta\)\)"),
    ("mesa(softmax)", "the base has none"),
    ("mesa(ccq(linear))", "normalises its queries"),
    ("mesa(differential(linear))", r"write differential\(mesa\(linear\)\)$"),
    ("laser(linear)", ""),
    ("lucid(linear)", ""),
    ("elu1(delta)", ""),
    ("qk_norm(delta)", ""),
    ("atk(linear)", "it changes the key that a delta rule"),
    ("atk(qk_norm[norm=l2](delta))", "it changes the key that a delta rule"),
    ("qk_norm[norm=l2](delta_product)", "several keys"),
    ("ccq(delta_product)", "several keys"),
]


@pytest.mark.parametrize(("text", "reason"), COMPOSITIONS)
def test_compositions_that_make_no_sense_are_refused_with_the_reason(text, reason):
    with pytest.raises(TypeError, match=rf"{re.escape(text)} makes no sense: .*{reason}"):
        pa.parse(text)


OPTIONS = [
    (pa.RowNormalized, {"eps": -1.0}, "row_normalized: option eps"),
    (pa.RowNormalized, {"axis": "row"}, "row_normalized: option axis"),
    (pa.QKNorm, {"norm": "batch"}, "qk_norm: option norm"),
    (pa.Differential, {"paired": ()}, "option paired must be different names"),
    (pa.Differential, {"paired": ("q", "q")}, "option paired must be different names"),
    (pa.Softmax, {"read": "log_mean_exp", "sink": True}, "weights that sum to one"),
    (pa.Softmax, {"buckets": 8}, "buckets belongs to distance='buckets'; found buckets=8"),
    (pa.Softmax, {"distance": "slopes", "max_distance": 8}, "max_distance belongs to distance="),
    (pa.Softmax, {"distance": "buckets", "buckets": 1}, "buckets must be 2 or above with causal"),
    (
        pa.Softmax,
        {"distance": "buckets", "buckets": 3, "causal": False},
        "buckets must be 4 or above with causal=false; found 3",
    ),
    (
        pa.Softmax,
        {"distance": "buckets", "max_distance": 16},
        "max_distance must be above 16, .*found 16",
    ),
    (pa.Softmax, {"distance": "alibi"}, "distance must be one of 'none', 'slopes', 'buckets'"),
    (pa.CCQ, {"tau": 2.0, "covariance": "decayed"}, "ccq: .*tau"),
    (pa.CCQ, {"tau": 0.0, "covariance": "query_weighted"}, "ccq: .*tau"),
    (pa.CCQ, {"backbone_key": "normalised"}, "ccq: .*backbone_key"),
    (pa.ATK, {"bound": 0.5}, "bound must be 1 or more"),
    (pa.ATK, {"learned": True, "center": 0.0}, "center is"),
    (pa.Nystrom, {"landmarks": 0}, "option landmarks must be a whole number, 1 or above; found 0"),
]


@pytest.mark.parametrize(("cls", "options", "words"), OPTIONS)
def test_options_are_checked(cls, options, words):
    base = [pa.GLA()] if cls is pa.CCQ else []
    with pytest.raises((TypeError, ValueError), match=words):
        cls(*base, **options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("linear[eps=0.1]", "eps"),
        ("windowed[size=5,grid=3/4]", "windows must fit into the grid"),
        ("windowed[size=2/5,grid=4]", "windows must fit into the grid"),
        ("windowed[size=4,shift=4]", "shift must be below size"),
        ("windowed[size=2/3,shift=2/1,grid=4/4]", "shift must be below size"),
        ("windowed[size=2/3]", "grid=none has one axis"),
        ("windowed[size=0]", "option size must be a whole number, 1 or above"),
        ("windowed[size=2/2/2]", "two of them"),
        ("windowed[causal=true]", "has no option 'causal'"),
        ("outlook[size=2/3]", "grid=none has one axis"),
        ("nystrom[causal=true]", "nystrom has no option 'causal'"),
        ("cross_covariance[causal=true]", "causal"),
        ("channel[scale=0.3,scale_by=tokens]", r"scale=0\.3 is the factor .* give one of them"),
    ],
)
def test_options_in_text_are_checked(text, words):
    with pytest.raises(ValueError, match=words):
        pa.parse(text)


@pytest.mark.parametrize("text", ["softmax[causal=false]", "outlook", "bidirectional"])
def test_what_is_not_causal_has_no_cache(text):
    m = pa.parse(text)
    with pytest.raises(ValueError, match="is not causal, so it can not have a cache"):
        m.init_cache(**Problem(s=4).x(m), capacity=4)


@pytest.mark.parametrize("text", ["softmax", "elu1", "lucid"])
def test_only_a_state_has_a_pullback(text):
    m = pa.parse(text)
    x = Problem(s=3).x(m)
    with pytest.raises(TypeError, match="extend_vjp"):
        m.extend_vjp(m.init_cache(**x, capacity=3), **x)


SHAPES = [
    ("hedgehog(gla)", "g", (2, 5, 2, 3)),
    ("rwkv6", "u", (2, 3)),
    ("gsa", "s", (2, 5, 2, 5)),
    ("linear", "k", (2, 5, 3, 3)),
    ("ssd", "k", (2, 5, 2, 3)),
    ("delta", "beta", (2, 5, 8, 1)),
    ("kda", "g", (2, 5, 4, 3)),
    ("gdn2", "w", (2, 5, 8, 3)),
    ("comba", "p", (2, 5, 8, 3)),
    ("hedgehog[per=head](linear)", "k_weight", (4, 3, 3)),
    ("hedgehog(linear)", "q_bias", (6,)),
    ("ccq(gla)", "contraction", (2, 5, 2)),
    ("ccq[covariance=query_weighted](linear)", "contraction", (1, 5, 4)),
    ("delta_product[steps=3]", "k", (2, 5, 2, 4, 3)),
    ("cross_covariance", "v", (2, 5, 2, 2)),
    ("windowed[bias=true]", "bias_table", (9, 4)),
    ("softmax[distance=buckets]", "bucket_table", (16, 4)),
    ("differential[per=layer]", "lam", (4,)),
    ("differential[per=head]", "lam", (2, 5, 4)),
    ("differential[per=token]", "lam", ()),
]


@pytest.mark.parametrize(("text", "name", "shape"), SHAPES)
def test_a_wrong_shape_is_refused_by_name(text, name, shape):
    m = pa.parse(text)
    x = Problem(s=5, n=2, group=2, values=2).x(m)
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        m(**(x | {name: np.zeros(shape)}))


@pytest.mark.parametrize("text", ["cross_covariance", "channel", "windowed", "bidirectional"])
def test_mechanisms_between_all_tokens_need_as_many_queries_as_keys(text):
    m = pa.parse(text)
    x = Problem(s=7).x(m)
    fewer = x | (
        {"k": x["k"][:, :3], "v": x["v"][:, :3]} if text == "windowed" else {"q": x["q"][:, :3]}
    )
    with pytest.raises(pa.ShapeError, match=r"found t = [37] and s = [37]"):
        m(**fewer)


@pytest.mark.parametrize("base", ["gated_delta", "ssd"])
def test_a_decayed_covariance_needs_one_gate_for_each_query_head(base):
    running, decayed = pa.parse(f"ccq({base})"), pa.parse(f"ccq[covariance=decayed]({base})")
    x = Problem(s=4, n=2, values=2).x(running)
    running(**x)
    for call in (decayed, decayed.vjp):
        with pytest.raises(pa.ShapeError, match=r"decayed.*: (v|g|beta) is declared"):
            call(**x)


@pytest.mark.parametrize(
    ("m", "masks", "words"),
    [
        (pa.Windowed(size=2, grid=(3, 5)), {}, "3 rows and 5 columns has 15 tokens; found s = 12"),
        (pa.RowNormalized(pa.Windowed(size=2, grid=(3, 5))), {}, "has 15 tokens"),
        (pa.Windowed(size=2, grid=(3, 4)), {"segment_ids"}, "packed sequences have a grid each"),
        (pa.Outlook(grid=(3, 5)), {}, "3 rows and 5 columns has 15 tokens; found s = 12"),
        (pa.Outlook(grid=(3, 4)), {"segment_ids"}, "together fill one; give grid=4"),
        (
            pa.Nystrom(3, start="batch"),
            {"segment_ids"},
            "packed sequences would depend on each other",
        ),
    ],
    ids=str,
)
def test_calls_that_do_not_fit_are_refused(m, masks, words):
    with pytest.raises(ValueError, match=words):
        m(**Problem(s=12).x(m), **{name: np.zeros((2, 12), dtype=int) for name in masks})
