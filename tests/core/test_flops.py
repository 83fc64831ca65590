"""FLOPs are declared by the leaves: the numbers, and what is unknown."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

import precondattn as pa
from precondattn.algebra import registry
from precondattn.algebra.flops import visible_pairs
from precondattn_conformance.bench.cases import layout
from precondattn_conformance.bench.cost import flops, keeps_tokens, leaf_flops

SIZES = layout(t=100, h=6, n=2, d=12, e=20)._replace(b=3, values_per_head=2).sizes

# forward, forward and backward, decode
EXPECTED = {
    "ccq": (12326400, 42422400, 128160),
    "conditioned_query": (6566400, 22982400, 12960),
    "contraction_gate": (5400, 10800, 54),
    "channel": (1036800, 3110400, 0),
    "cross_covariance": (1036800, 3110400, 0),
    "delta": (34675200, 121363200, 60480),
    "delta_product": (69350400, 242726400, 120960),
    "dplr": (69350400, 242726400, 120960),
    "deltaformer": (5760000, 19440000, 115200),
    "difference": (108000, 216000, 1080),
    "differential": (11628000, 39096000, 231480),
    "elu1": (5846400, 19612800, 116064),
    "elu_plus_one": (64800, 129600, 648),
    "gated_delta": (34675200, 121363200, 60480),
    "kda": (34675200, 121363200, 60480),
    "gdn2": (34675200, 121363200, 60480),
    "atk": (34804800, 121816800, 61776),
    "comba": (34675200, 121363200, 60480),
    "erasing_delta": (34675200, 121363200, 60480),
    "erasing_gated_delta": (34675200, 121363200, 60480),
    "erasing_gdn2": (34675200, 121363200, 60480),
    "erasing_kda": (34675200, 121363200, 60480),
    "preconditioned_key": (129600, 453600, 1296),
    "gla": (9100800, 31852800, 21600),
    "gsa": (51609600, 180633600, 184320),
    "hedgehog": (8611200, 30153600, 165312),
    "hedgehog_map": (518400, 1555200, 5184),
    "l2_norm": (64800, 129600, 648),
    "laser": (5760000, 19440000, 115200),
    "layer_norm": (64800, 129600, 648),
    "linear": (9100800, 31852800, 21600),
    "lucid": (7680000, 25920000, 153600),
    "lucid_solve": (1920000, 6480000, 38400),
    "nystrom": (244187136, 847282176, 0),
    "outlook": (648000, 1944000, 0),
    "path": (6165000, 23118750, 123300),
    "per_dim_scale": (5824800, 19569600, 115848),
    "qk_norm": (5846400, 19612800, 116064),
    "query_weighted_query": (6566400, 22982400, 12960),
    "retention": (9100800, 31852800, 21600),
    "rms_norm": (64800, 129600, 648),
    "row_normalized": (5868000, 19656000, 116280),
    "scaled_dims": (64800, 129600, 648),
    "softmax": (5760000, 19440000, 115200),
    "ssd": (18201600, 63705600, 43200),
    "mesa": (149529600, 490521600, 110592),
    "mesa_query": (65664000, 213408000, 33696),
    "stable_beta": (10800, 21600, 108),
    "stable_step": (34686000, 121384800, 60588),
    "symmetric_lucid_solve": (38400000, 82080000, 0),
    "temperature": (5824800, 19569600, 115848),
    "tempered": (64800, 129600, 648),
    "unit_rows": (108000, 216000, 1080),
    "windowed": (460800, 1555200, 4608),
    "softmax[causal=false]": (11520000, 38880000, 115200),
    "softmax[window=3]": (340416, 1148904, 3456),
    "softmax[causal=false,window=3]": (576000, 1944000, 3456),
    "lucid(path)": (8220000, 30825000, 161700),
    "lucid[metric=dot](path)": (8085000, 29598750, 161700),
    "lucid(softmax[window=3])": (453888, 1531872, 4608),
    "unit_rows[axis=channel]": (108000, 216000, 1080),
    "linear[normalize=true]": (9100800, 31852800, 21600),
    "ccq(gated_delta)": (41306400, 144475200, 74088),
    "hedgehog(gla)": (14284800, 49651200, 50112),
}
"""The FLOPs at `SIZES`, by the formulas of the table in `precondattn/algebra/flops.py`."""


def sizes_of(mechanism):
    shapes = {name: pattern.shape(SIZES) for name, pattern in mechanism.inputs.items()}
    return mechanism.inputs.sizes(str(mechanism), shapes)


@pytest.mark.parametrize("expression", EXPECTED)
def test_the_flops_of_every_mechanism_equal_the_saved_numbers(expression):
    m = pa.parse(expression)
    works = ("forward", "forward_backward", "decode")
    assert tuple(flops(m, sizes_of(m), work) for work in works) == EXPECTED[expression]


def test_every_mechanism_of_the_library_declares_its_flops():
    for name, cls in registry.registered().items():
        if cls.__module__.startswith("precondattn."):
            assert None not in leaf_flops(cls().program, sizes_of(cls())), name


@pytest.fixture
def unregistered():
    """Unregister the mechanisms that a test defines."""
    before = set(registry.registered())
    yield
    for name in set(registry.registered()) - before:
        pa.unregister_mechanism(name)


def test_flops_that_no_leaf_declares_are_unknown(unregistered):
    @dataclass(frozen=True)
    class Undeclared(pa.Leaf):
        name: ClassVar[str] = "undeclared"
        inputs = pa.Inputs(q="b t h d", k="b s n d", v="b s n e")
        output = "b t h e"

    m = pa.parse("row_normalized(undeclared)")
    undeclared, unit_rows = leaf_flops(m.program, sizes_of(m))
    assert undeclared is None
    assert unit_rows is not None
    assert flops(m, sizes_of(m), "forward") is None


def test_a_matrix_that_multiplies_tokens_makes_the_flops_of_a_token_wise_leaf_unknown(unregistered):
    @dataclass(frozen=True)
    class Mapped(pa.TokenWise):
        name: ClassVar[str] = "mapped"
        inputs = pa.Inputs(x="b t h d", weight="h d d", bias="h d")
        output = "b t h d"

    @dataclass(frozen=True)
    class Shifted(pa.TokenWise):
        name: ClassVar[str] = "shifted"
        inputs = pa.Inputs(x="b t h d", bias="h d")
        output = "b t h d"

    assert flops(Mapped(), sizes_of(Mapped()), "forward") is None
    assert flops(Shifted(), sizes_of(Shifted()), "forward") == 3 * 3 * 100 * 6 * 12


def test_the_flops_of_a_state_follow_from_its_slots(unregistered):
    @dataclass(frozen=True)
    class TwoStates(pa.Stateful):
        name: ClassVar[str] = "two_states"
        inputs = pa.Inputs(k="b s n d", v="b s n e")
        output = "b s n e"

        def slots(self):
            return (
                pa.Slot("first", "two.first({k})", "b n d d", wide=True),
                pa.Slot("second", "two.second({k}, {v})", "b n d e", wide=True),
                pa.Slot("count", "two.count({k})", "b n", wide=True),
            )

    @dataclass(frozen=True)
    class Average(pa.Stateful):
        name: ClassVar[str] = "average"
        inputs = pa.Inputs(k="b s n d")
        output = "b s n d"

        def slots(self):
            return (pa.Slot("sum", "average.sum({k})", "b n d", wide=True),)

    d, e = 12, 20
    assert flops(TwoStates(), sizes_of(TwoStates()), "decode") == 3 * 2 * 5 * (d * d + d * e)
    assert flops(Average(), sizes_of(Average()), "decode") is None


def test_leaves_that_store_tokens_are_those_with_a_buffer_per_token():
    quadratic = {
        name
        for name, cls in registry.registered().items()
        if issubclass(cls, pa.Leaf) and keeps_tokens(cls())
    }
    assert quadratic == {
        "softmax",
        "path",
        "deltaformer",
        "lucid_solve",
        "query_weighted_query",
    }


def test_the_pairs_of_a_window_are_counted():
    for t, causal, window in ((9, True, 4), (9, True, 20), (9, True, None), (9, False, None)):
        pairs = sum(
            (not causal or j <= i) and (window is None or abs(i - j) < window)
            for i in range(t)
            for j in range(t)
        )
        # Twice the pairs, less the diagonal's half.
        diagonal = min(window or t, t) if causal else 0
        assert visible_pairs(t, t, causal=causal, window=window) == 2 * pairs - diagonal
