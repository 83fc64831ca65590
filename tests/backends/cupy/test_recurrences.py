"""The CUDA kernels of the gated delta rule and its variants against the definition, simulated."""

from itertools import pairwise

import numpy as np
import pytest

import precondattn as pa
from precondattn.backend import Request
from precondattn_cupy import Cupy
from precondattn_cupy.recurrence import scan
from precondattn_kernel_tools.cuda_simulator import checked
from tests.backends.cupy.simulated import DTYPES, ORDERS, error
from tests.kernel_tools.toolchain import needs_simulator

# Thorough: the first test of each kernel compiles it for the simulator, which takes seconds.
pytestmark = pytest.mark.thorough

BOUNDS = {"float32": 2e-6, "bfloat16": 1.5e-2, "float16": 2e-3}
BACKENDS = ("cupy", "portable")


@pytest.fixture(autouse=True)
def unwritten_is_nan(monkeypatch):
    empty = scan.empty

    def full(like, shape, dtype=None):
        array = empty(like, shape, dtype)
        array[...] = np.nan
        return array

    monkeypatch.setattr(scan, "empty", full)


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    monkeypatch.setattr(scan, "SEGMENT", 8)


def problem(layer, t, d=12, e=16, b=1, heads=(1, 2), keys="random", gates="random"):
    """Inputs; `heads` are those of keys, and those of states or queries."""
    rng = np.random.default_rng(t)
    n, m = heads
    sizes = {"b": b, "t": t, "s": t, "d": d, "e": e, "h": m, "u": m, "n": n, "m": 5}
    if getattr(getattr(layer, "declares", None), "heads", "n") == "u":
        sizes["h"] = n
    x = {name: rng.normal(size=pattern.shape(sizes)) for name, pattern in layer.inputs.items()}
    if keys == "clustered":
        x["k"] = 0.1 * x["k"] + rng.normal(size=(1, 1, 1, d))
    if keys == "equal":
        x["k"] = np.broadcast_to(x["k"][:, :1], x["k"].shape).copy()
    x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
    if keys == "zero":
        x["k"][:, ::3] = 0
    if "g" in x:
        x["g"] = -0.3 * np.abs(x["g"])
        if gates == "extreme":
            x["g"] = rng.choice([0.0, -1e-6, -20.0, -1e4], size=x["g"].shape)
    if "beta" in x:
        x["beta"] = rng.uniform(0, 2, x["beta"].shape)
        x["beta"][:, ::4] = 0
        x["beta"][:, 1::4] = 1
    if "contraction" in x:
        x["contraction"] = rng.uniform(size=x["contraction"].shape)
    return {name: array.astype(np.float32) for name, array in x.items()}


def wide(arrays):
    return {name: array.astype(np.float64) for name, array in arrays.items()}


def check(layer, x, dtype="float32", bound=None, order=None, **masks):
    """Output and gradients, against the definition in double precision."""
    x = {name: array.astype(DTYPES[dtype]) for name, array in x.items()}
    expected, pullback = layer.vjp(**wide(x), **masks, backend="reference")
    d_out = np.random.default_rng(0).normal(size=expected.shape).astype(DTYPES[dtype])
    gradients = pullback(d_out.astype(np.float64))
    with checked(order):
        out, pullback = layer.vjp(**x, **masks, backend=BACKENDS)
        result = pullback(d_out)
    bound = bound or BOUNDS[dtype]
    assert error(out, expected) < bound
    assert out.dtype == DTYPES[dtype]
    for name, gradient in gradients.items():
        assert error(result[name], gradient) < 2 * bound, name
        assert result[name].dtype == DTYPES[dtype]


@pytest.mark.thorough
@needs_simulator
@pytest.mark.parametrize(
    ("t", "dtype", "d", "e"),
    [(17, "float32", 20, 40), (15, "bfloat16", 12, 20), (1, "float32", 5, 5)],
)
def test_lengths_around_a_segment_blocks_of_channels_and_dtypes(t, dtype, d, e):
    check(pa.GatedDelta(), problem(pa.GatedDelta(), t, d=d, e=e, heads=(1, 1)), dtype)


@pytest.mark.thorough
@needs_simulator
def test_outputs_in_float16():
    x = problem(pa.GatedDelta(), 17)
    x = {name: array.astype(np.float16) for name, array in x.items()}
    expected = pa.GatedDelta()(**wide(x), backend="reference")
    out = pa.GatedDelta()(**x, backend=BACKENDS)
    assert error(out, expected) < BOUNDS["float16"]


@needs_simulator
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("t", [7, 9])
def test_any_order_of_blocks_and_threads_gives_the_definition(t, order):
    check(pa.GatedDelta(), problem(pa.GatedDelta(), t, heads=(1, 1)), order=order)


@pytest.mark.thorough
@needs_simulator
def test_the_widest_keys():
    x = problem(pa.GatedDelta(), 9, d=256, heads=(1, 1))
    expected = pa.GatedDelta()(**wide(x), backend="reference")
    assert error(pa.GatedDelta()(**x, backend=BACKENDS), expected) < BOUNDS["float32"]


@needs_simulator
@pytest.mark.parametrize("keys", ["clustered", "equal"])
def test_keys_that_coincide_or_nearly_do(keys):
    check(pa.GatedDelta(), problem(pa.GatedDelta(), 20, keys=keys, heads=(1, 1)), bound=1e-5)


@pytest.mark.thorough(but=("equal",))
@needs_simulator
@pytest.mark.parametrize("keys", ["clustered", "equal"])
def test_coinciding_keys_cost_no_accuracy_in_float16(keys):
    x = problem(pa.Delta(), 30, keys=keys, heads=(1, 1))
    x["beta"] = np.full_like(x["beta"], 1.95)
    check(pa.Delta(), x, "float16", bound=8e-4)


@needs_simulator
def test_zero_keys_and_open_gates_next_to_closed_ones():
    check(pa.GatedDelta(), problem(pa.GatedDelta(), 19, keys="zero", gates="extreme"))


@needs_simulator
def test_a_strong_gate_costs_later_weak_gates_no_accuracy():
    x = problem(pa.GatedDelta(), 32, heads=(1, 1))
    x["g"] = 1e-3 * x["g"]
    x["g"][:, 5] = -150.0
    check(pa.GatedDelta(), x, bound=1e-6)


@needs_simulator
@pytest.mark.parametrize(
    "layer", ["delta[scale=0.3]", "ssd", "retention", "linear", "linear[normalize=true]"]
)
def test_special_cases_run_by_the_same_kernels(layer):
    layer = pa.parse(layer)
    x = problem(layer, 18)
    if layer == pa.Linear(normalize=True):
        x |= {"q": np.abs(x["q"]), "k": np.abs(x["k"])}
    check(layer, x)


@needs_simulator
def test_contracted_queries_run_by_the_same_kernels():
    x = problem(pa.GatedDelta(), 17, heads=(1, 1))
    x["contraction"] = np.random.default_rng(0).uniform(size=(1, 17, 1)).astype(np.float32)
    check(pa.parse("ccq(gated_delta)"), x)
    layer = pa.ConditionedQuery(decay="head")
    check(layer, problem(layer, 17), "bfloat16")


@needs_simulator
@pytest.mark.parametrize("layer", ["gated_delta", "retention", "linear"])
def test_fewer_queries_than_keys_are_those_of_the_last_tokens(layer):
    layer = pa.parse(layer)
    x = problem(layer, 21)
    check(layer, x | {"q": x["q"][:, 11:]})


@needs_simulator
def test_four_heads_that_share_two_key_heads_with_arbitrary_strides():
    x = problem(pa.GatedDelta(), 19, heads=(2, 4))
    for name, array in x.items():
        x[name] = np.ascontiguousarray(array.T).T
    check(pa.GatedDelta(), x)


@needs_simulator
def test_padding_and_other_segments_have_no_effect():
    x = problem(pa.GatedDelta(), 20, b=2, heads=(1, 1))
    segments = np.array([[0] * 3 + [2] * 12 + [5] * 5, [1] * 20])
    check(pa.GatedDelta(), x, segment_ids=segments)
    for array in x.values():
        array[1, 3:] = np.nan
    check(pa.GatedDelta(), x, lengths=np.array([20, 3]))
    is_visible = np.arange(20)[None] % 3 != 1
    check(pa.Delta(), problem(pa.Delta(), 20, heads=(1, 1)), key_mask=is_visible)
    check(pa.Delta(), problem(pa.Delta(), 20, heads=(1, 1)), segment_ids=segments[:1])


def states_of(layer, x):
    """A cache with random states."""
    rng = np.random.default_rng(1)
    cache = layer.init_cache(**x)
    store = {
        name: rng.uniform(size=array.shape).astype(np.float32)
        for name, array in cache.store.items()
    }
    return cache._replace(store=store)


@needs_simulator
@pytest.mark.parametrize(
    ("layer", "cuts"),
    [
        ("gated_delta", (0, 1, 17, 18)),
        ("ssd", (0, 8, 9)),
        ("ccq(gated_delta)", (0, 5, 6)),
    ],
)
def test_any_split_continues_the_state_and_its_gradient(layer, cuts):
    layer = pa.parse(layer)
    check_splits(
        layer, problem(layer, cuts[-1], heads=(1, 2) if layer == pa.GatedDelta() else (1, 1)), cuts
    )


def check_splits(layer, x, cuts):
    """Output, states and gradients of extensions from a random state, against one call."""
    first = states_of(layer, x)
    exact = first._replace(store=wide(first.store))
    out, last, pullback = layer.extend_vjp(exact, **wide(x), backend="reference")
    rng = np.random.default_rng(2)
    d_out = rng.normal(size=out.shape).astype(np.float32)
    d_last = {name: rng.normal(size=a.shape).astype(np.float32) for name, a in last.store.items()}
    expected, d_first = pullback(d_out.astype(np.float64), wide(d_last))

    cache, outs, pullbacks = first, [], []
    for start, stop in pairwise(cuts):
        part = {name: a[:, start:stop] for name, a in x.items()}
        piece, cache, back = layer.extend_vjp(cache, **part, backend=BACKENDS)
        outs.append(piece)
        pullbacks.append((start, stop, back))
    d_state, result = d_last, []
    for start, stop, back in reversed(pullbacks):
        gradients, d_state = back(d_out[:, start:stop], d_state)
        result.insert(0, gradients)
    assert error(np.concatenate(outs, axis=1), out) < 2e-6
    for name, state in last.store.items():
        assert error(cache.store[name], state) < 2e-6
        assert error(d_state[name], d_first[name]) < 4e-6
    for name, gradient in expected.items():
        parts = np.concatenate([each[name] for each in result], axis=1)
        assert error(parts, gradient) < 4e-6, name


@needs_simulator
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("layer", "dtype"),
    [("gated_delta", "float32"), ("gated_delta", "bfloat16"), ("linear", "float32")],
)
def test_a_token_reads_and_writes_the_state_once(layer, dtype, order):
    """Several queries per state, several blocks of values, a closed gate."""
    layer = pa.parse(layer)
    x = problem(layer, 1, e=40, heads=(2, 4), b=2)
    x = {name: array.astype(DTYPES[dtype]) for name, array in x.items()}
    if "g" in x:
        x["g"][:, :, 0] = -1e4
    if "beta" in x:
        x["beta"][:] = 0.7
    check_token(layer, x, dtype, order)


def check_token(layer, x, dtype, order=None):
    """The output and the states of an extension of a random state, against the definition."""
    cache = states_of(layer, x)
    exact = cache._replace(store=wide(cache.store))
    expected, last = layer.extend(exact, **wide(x), backend="reference")
    with checked(order):
        out, new = layer.extend(cache, **x, backend=BACKENDS)
    assert error(out, expected) < BOUNDS[dtype]
    for name, state in last.store.items():
        assert error(new.store[name], state) < 2e-6
        assert new.store[name].dtype == np.float32


@needs_simulator
def test_an_extension_of_sequences_of_unequal_lengths():
    layer = pa.GatedDelta()
    x = problem(layer, 18, b=2, heads=(1, 1))
    cache, lengths = states_of(layer, x), np.array([18, 0])
    exact = cache._replace(store=wide(cache.store))
    expected, last = layer.extend(exact, **wide(x), lengths=lengths, backend="reference")
    out, new = layer.extend(cache, **x, lengths=lengths, backend="cupy")
    assert error(out, expected) < 1e-6
    for name, state in last.store.items():
        assert error(new.store[name], state) < 1e-6


@pytest.mark.parametrize(
    ("layer", "changes", "reason"),
    [
        ("gated_delta", {"k": (2, 20, 2, 264)}, "d=264"),
        ("gated_delta", {"v": (2, 20, 2, 520)}, "e=520"),
        ("gated_delta", {"v": (0, 20, 2, 8)}, "empty"),
        ("kda", {"k": (2, 20, 2, 264)}, "d=264"),
        ("gsa", {}, "no kernels"),
        ("linear", dict.fromkeys("qkv", (40000, 20, 2, 8)), "65535 heads"),
        ("conditioned_query", {"k": (2, 20, 2, 300)}, "d=300"),
    ],
)
def test_unsupported_calls_are_declined_with_the_reason(layer, changes, reason):
    shape = (2, 20, 2, 8)
    shapes = {"q": shape, "k": shape, "v": shape} | changes
    leaf = pa.parse(layer) if layer != "conditioned_query" else pa.ConditionedQuery()
    request = Request("vjp", "numpy", "cpu", "float32", tuple(shapes.items()), frozenset())
    refusal = Cupy().refusal(leaf, request)
    assert reason in refusal


@pytest.mark.thorough
@needs_simulator
def test_a_recurrence_is_computed_by_any_name():
    """Comba with decayed erasing has the recurrence of the gated delta rule with another key."""
    layer = pa.Comba(erases="decayed")
    assert layer.recurrence == pa.ErasingGatedDelta().recurrence
    check(layer, problem(layer, 19))
