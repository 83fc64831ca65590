"""FLOPs are declared by the leaves: the numbers, what is unknown, and what PyTorch counts."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

import precondattn as pa
from precondattn.algebra import registry
from precondattn.algebra.flops import visible_pairs
from precondattn_conformance.bench.cases import layout
from precondattn_conformance.bench.cost import flops, keeps_tokens, leaf_flops
from precondattn_conformance.declared import derived, expressions
from tests.core.inputs import inputs_of

SIZES = layout(t=100, h=6, n=2, d=12, e=20)._replace(b=3, values_per_head=2).sizes

# forward, forward and backward, decode
EXPECTED = {
    "ccq": (12326400, 42422400, 128160),
    "channel": (1036800, 3110400, 0),
    "delta_product": (69350400, 242726400, 120960),
    "deltaformer": (5760000, 19440000, 115200),
    "difference": (108000, 216000, 1080),
    "gsa": (51609600, 180633600, 184320),
    "hedgehog_map": (518400, 1555200, 5184),
    "softmax[causal=false]": (11520000, 38880000, 115200),
    "gated_delta": (34675200, 121363200, 60480),
    "gla": (9100800, 31852800, 21600),
    "linear[normalize=true]": (9100800, 31852800, 21600),
    "lucid": (7680000, 25920000, 153600),
    "lucid(path)": (8220000, 30825000, 161700),
    "mesa_query": (65664000, 213408000, 33696),
    "nystrom": (244187136, 847282176, 0),
    "outlook": (648000, 1944000, 0),
    "path": (6165000, 23118750, 123300),
    "preconditioned_key": (129600, 453600, 1296),
    "query_weighted_query": (6566400, 22982400, 12960),
    "softmax": (5760000, 19440000, 115200),
    "softmax[window=3]": (340416, 1148904, 3456),
    "ssd": (18201600, 63705600, 43200),
    "stable_beta": (10800, 21600, 108),
    "symmetric_lucid_solve": (38400000, 82080000, 0),
    "unit_rows[axis=channel]": (108000, 216000, 1080),
    "windowed": (460800, 1555200, 4608),
}
"""The FLOPs at `SIZES`, by the formulas of the table in `precondattn/algebra/flops.py`."""


def sizes_of(mechanism):
    shapes = {name: pattern.shape(SIZES) for name, pattern in mechanism.inputs.items()}
    return mechanism.inputs.sizes(str(mechanism), shapes)


@pytest.mark.parametrize("expression", EXPECTED)
def test_the_flops_of_each_formula_equal_the_saved_numbers(expression):
    m = pa.parse(expression)
    works = ("forward", "forward_backward", "decode")
    assert tuple(flops(m, sizes_of(m), work) for work in works) == EXPECTED[expression]


def test_every_mechanism_of_the_library_declares_its_flops():
    ours = {n: c() for n, c in registry.registered().items() if c.__module__.startswith("preconda")}
    for name, m in ours.items():
        assert None not in leaf_flops(m.program, sizes_of(m)), name
    quadratic = {name for name, m in ours.items() if isinstance(m, pa.Leaf) and keeps_tokens(m)}
    tokens = {"softmax", "path", "deltaformer", "lucid_solve", "query_weighted_query"}
    assert quadratic == tokens


def leaf(base, name, output, slots=(), **inputs):
    members = {"name": name, "inputs": pa.Inputs(**inputs), "output": output}
    members |= {"__annotations__": {"name": ClassVar[str]}, "slots": lambda self: slots}
    return dataclass(frozen=True)(type(name, (base,), members))()


def test_flops_that_no_leaf_declares_are_unknown(unregistered):
    x = {"x": "b t h d", "bias": "h d"}
    leaf(pa.Leaf, "undeclared", "b t h e", q="b t h d", k="b s n d", v="b s n e")
    mapped = leaf(pa.TokenWise, "mapped", "b t h d", **x, weight="h d d")
    shifted = leaf(pa.TokenWise, "shifted", "b t h d", **x)
    m = pa.parse("row_normalized(undeclared)")
    undeclared, unit_rows = leaf_flops(m.program, sizes_of(m))
    assert undeclared is None
    assert unit_rows is not None
    assert flops(m, sizes_of(m), "forward") is None
    assert flops(mapped, sizes_of(mapped), "forward") is None  # A matrix multiplies its tokens.
    assert flops(shifted, sizes_of(shifted), "forward") == 3 * 3 * 100 * 6 * 12


def test_the_flops_of_a_state_follow_from_its_slots(unregistered):
    slots = (
        pa.Slot("first", "two.first({k})", "b n d d", wide=True),
        pa.Slot("second", "two.second({k}, {v})", "b n d e", wide=True),
        pa.Slot("count", "two.count({k})", "b n", wide=True),
    )
    two = leaf(pa.Stateful, "two_states", "b s n e", slots, k="b s n d", v="b s n e")
    slots = (pa.Slot("sum", "average.sum({k})", "b n d", wide=True),)
    average = leaf(pa.Stateful, "average", "b s n d", slots, k="b s n d")
    assert flops(two, sizes_of(two), "decode") == 3 * 2 * 5 * (12 * 12 + 12 * 20)
    assert flops(average, sizes_of(average), "decode") is None


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


def counted(call):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        result = call()
    return result, counter.get_total_flops()


def call_of(expression, *, requires_grad=True):
    """The mechanism, its inputs, and its declared FLOPs by work; 0 where they are unknown."""
    m = pa.parse(expression)
    x = inputs_of(m, "torch", "clustered", t=6, requires_grad=requires_grad)
    sizes = m.inputs.sizes(expression, {name: array.shape for name, array in x.items()})
    return m, x, [flops(m, sizes, work) or 0 for work in ("forward", "forward_backward")]


WHOLE = [e for e in sorted({*expressions()} - derived()) if "[" not in e]


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("expression", WHOLE)
def test_counted_flops_are_those_declared_and_counting_changes_no_gradient(expression, backend):
    m, x, (forward, whole) = call_of(expression)
    out, of_call = counted(lambda: m(**x, backend=backend))
    _, of_gradient = counted(lambda: out.sum().backward())  # In another counter.
    plain = m(**{name: array.detach() for name, array in x.items()}, backend=backend)
    pytest.importorskip("torch").testing.assert_close(plain, out.detach())
    if forward:  # Its leaves all declare FLOPs.
        assert (of_call, of_gradient) == (int(forward), int(whole) - int(forward))


@pytest.mark.parametrize(
    ("expression", "requires_grad"), [("linear", False), ("linear", True), ("softmax", False)]
)
def test_a_step_of_one_token_counts_as_decoding(expression, requires_grad):
    """A cache of tokens counts all its slots."""
    m, x, _ = call_of(expression, requires_grad=False)
    cache = m.init_cache(**x, capacity=8)
    one = {name: array[:, :1].clone().requires_grad_(requires_grad) for name, array in x.items()}
    (out, extended), number = counted(lambda: m.extend(cache, **one))
    b, _, h, d = x["q"].shape
    e = x["v"].shape[-1]
    assert number == b * h * (5 * d * e if expression == "linear" else 2 * 9 * (d + e))
    expected, again = m.extend(cache, **one)
    assert out.equal(expected)
    assert all(a.equal(again.store[name]) for name, a in extended.store.items())
