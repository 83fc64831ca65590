"""Steps of one token by CUDA kernels, and split calls of recurrences, in the simulator."""

import re
from itertools import pairwise

import numpy as np
import pytest

import precondattn as pa
from precondattn.spec.recurrence import Stream, recurrent, recurrent_vjp
from precondattn_cupy import variants
from precondattn_cupy.lucid import step as lucid_step
from precondattn_cupy.recurrence.scan import Scan
from precondattn_cupy.softmax import step as softmax_step
from precondattn_kernel_tools.cuda_simulator import checked
from tests.backends.cupy.simulated import all_wide, check_step, inputs_of
from tests.backends.kernel_problems import error, later
from tests.backends.portable.test_erase_keys import assert_close, stream
from tests.kernel_tools.toolchain import needs_simulator

pytestmark = needs_simulator
LATER = pytest.mark.thorough

ATTENTION = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}
LUCID = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 1e-2}


HOW = ("bound", "capacity", "order", "of_state", "lengths", "key_mask")


def step(name, mechanism, held, dtype="float32", **given):
    """A parameter: a step after `held` tokens."""
    bounds = LUCID if "lucid" in mechanism else ATTENTION
    how = {"bound": bounds[dtype]} | {key: given.pop(key) for key in HOW if key in given}
    if "lucid" in mechanism:
        given = {"keys": "clustered"} | given
    return pytest.param(
        pa.parse(mechanism), held, dtype, how, given, id=f"{mechanism}: {name} {dtype}"
    )


def lengths(*now):
    return {"lengths": tuple(map(np.array, now))}


PADDED = lengths([50, 0, 17], [1, 1, 0])
MASKED = {
    "key_mask": (
        (np.arange(50) % 5 > 1)[None] & np.array([[True], [True], [False]]),
        np.array([[True], [False], [False]]),
    )
}
BOTH = ("softmax", "laser")


TWO = {"h": 4, "n": 2, "b": 2}
THREE = {"b": 3, "h": 2, "n": 2, "keys": "clustered"}
NARROW, SAME = {"d": 12, "e": 20}, {"d": 16, "e": 32}
CAPACITIES = ((40, 31), (40, 32), (37, 0), (37, 3))
"""Rows that are aligned or not; caches that end within a tile, and at its end."""
CLOSED = {**TWO, "e": 40, "gates": "extreme"}
STEPS = (
    *(step(f"{held}", name, held, d=16, e=16) for name in BOTH for held in (0, 1, 64, 65, 300)),
    *(step(dtype, name, 65, dtype, **SAME) for name in BOTH for dtype in ("float16", "bfloat16")),
    *(
        step(f"{order} of {capacity}", name, 130, **TWO, e=5, order=order, capacity=capacity)
        for name in BOTH
        for capacity, order in ((136, "reverse"), (140, 0))
    ),
    *(step("more heads than a tile has rows", name, 39, h=38, n=2) for name in BOTH),
    *(step("wide rows", name, 39, d=70, e=100) for name in BOTH),
    *(step(f"values of size {size}", "laser", 130, b=2, apart=size) for size in (1e-2, 100.0)),
    *(step("lengths", name, 50, b=3, **PADDED) for name in BOTH),
    *(step("masked", name, 50, b=3, **MASKED) for name in BOTH),
    *later(
        *(
            step(f"{held} of {capacity}", leaf, held, dtype, **sizes, capacity=capacity)
            for capacity, held in CAPACITIES
            for dtype, leaf, sizes in (
                ("float32", "lucid", {**TWO, **NARROW}),
                ("float16", "lucid[beta=true]", {"h": 3, "b": 2, **SAME}),
                ("bfloat16", "lucid", {"n": 2, "b": 2, **SAME}),
            )
        ),
        step("zero keys", "lucid[eps=0]", 18, **TWO, keys="zero"),
        step("zero keys", "lucid[normalize=queries_and_keys]", 18, **TWO, keys="zero"),
        # Two warps; the second one computes the key.
        step("many query heads", "lucid", 18, h=19, keys="clustered"),
        step("wide", "lucid[scale=0.1]", 34, "bfloat16", d=100, e=132, bound=2e-2),
        step("overflowing exponentials", "lucid", 35, **TWO, size=300.0, bound=1e-4),
        step("lengths", "lucid", 50, **THREE, **PADDED),
        step("masked", "lucid[beta=true]", 50, **THREE, **MASKED),
        *(
            step(f"{dtype}, order {order}", leaf, 3, dtype, **CLOSED, order=order, bound=bound)
            for leaf, dtype, order, bound in (
                ("gated_delta", "float32", None, 2e-6),
                ("gated_delta", "bfloat16", "reverse", 1.5e-2),
                ("linear", "float32", 0, 2e-6),
                ("kda", "float32", None, 2e-6),
                ("kda", "float16", 0, 2e-3),
                ("atk(kda)", "float32", 0, 2e-6),
            )
        ),
        # The key that one kernel passes to the other one has the dtype of the call.
        step("bfloat16", "atk(kda)", 3, "bfloat16", **CLOSED, bound=1.5e-2, of_state=5e-3),
        *(
            step("lengths", leaf, 50, b=3, h=1, bound=1e-6, **PADDED)
            for leaf in ("gated_delta", "kda")
        ),
    ),
)


@pytest.mark.parametrize(("mechanism", "held", "dtype", "how", "given"), STEPS)
def test_a_step_is_that_of_the_definition(mechanism, held, dtype, how, given):
    x = inputs_of(mechanism, held + 1, dtype, **given)
    out = check_step(mechanism, x, **how)
    if how.keys() & {"lengths", "key_mask"}:
        assert (out[2] == 0).all()  # The last sequence has no new token, or no key.


def test_every_branch_of_a_step_has_a_row():
    """What a row launches is what is shipped, with its dtypes."""
    attention = {"softmax": "softmax", "laser": "laser", "lucid": "lucid[beta=true]"}
    taken = set()
    for parameter in STEPS:
        mechanism, _, dtype, _, given = parameter.values
        if mechanism.name in attention:
            taken |= launched(
                attention[mechanism.name], dtype, given.get("d", 12), given.get("e", 20)
            )
    shipped = (
        launched(mechanism, dtype, *widths)
        for mechanism, dtypes, (widths, *_) in variants.STEPS
        for dtype in dtypes
    )
    assert set().union(*shipped) <= taken


def launched(mechanism, dtype, d, e):
    """The kernels of a step, with their template arguments that are no sizes."""
    launches = variants.launches(mechanism, dtype, d, e, True)
    return {re.sub(r"\b\d\d+\b", "#", launch.kernel) for launch in launches}


@pytest.mark.thorough
@pytest.mark.parametrize("processors", [1, 6])
def test_a_cache_is_read_in_one_part_or_in_one_part_for_each_tile(processors, monkeypatch):
    """A short sequence has fewer tiles."""
    monkeypatch.setattr(lucid_step, "processors", lambda: processors)
    x = inputs_of(pa.Lucid(), 21, h=2, n=2, b=3, keys="clustered")
    check_step(pa.Lucid(), x, 2e-5, **lengths([20, 0, 7], [1, 1, 0]))


@pytest.mark.parametrize(
    ("name", "at"),
    [
        *((name, at) for name in BOTH for at in (3, 5)),
        *(pytest.param("lucid", at, marks=LATER) for at in (3, 5)),
    ],
)
def test_a_nan_in_a_cached_or_in_the_new_key_reaches_the_output(name, at):
    mechanism = pa.parse(name)
    x = inputs_of(mechanism, 6, b=2)
    x["k"][:, at, 0, 3] = np.nan
    past, new = ({n: a[:, part] for n, a in x.items()} for part in (slice(5), slice(5, 6)))
    cache = mechanism.init_cache(**new, capacity=8)
    _, cache = mechanism.extend(cache, **past, backend="reference")
    out, _ = mechanism.extend(cache, **new, backend=("cupy", "portable"))
    assert np.isnan(out).all()


def test_every_block_consists_of_full_tiles():
    tile = softmax_step.WARPS * softmax_step.COLUMNS
    for count in (0, 1, 63, 64, 65, 1000):
        for heads in (1, 3, 100):
            splits, each = softmax_step._splits(count, heads)
            assert each % tile == 0
            assert splits * each >= count > (splits - 1) * each or count == splits == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("expression", "h", "cuts"),
    [
        ("gated_delta", 2, (0, 1, 17, 18)),
        ("ssd", 1, (0, 8, 9)),
        ("ccq(gated_delta)", 1, (0, 5, 6)),
        ("kda", 2, (0, 1, 6, 7)),
        ("atk(kda)", 2, (0, 1, 6, 7)),
    ],
)
def test_any_split_continues_the_state_and_its_gradient(expression, h, cuts):
    """Extensions of a random state against one call of the definition."""
    mechanism, rng = pa.parse(expression), np.random.default_rng(1)
    x = inputs_of(mechanism, cuts[-1], h=h)
    first = mechanism.init_cache(**x)
    state = {n: rng.uniform(size=a.shape).astype(np.float32) for n, a in first.store.items()}
    cache = first = first._replace(store=state)
    exact = first._replace(store=all_wide(first.store))
    out, last, pullback = mechanism.extend_vjp(exact, **all_wide(x), backend="reference")
    d_out = rng.normal(size=out.shape).astype(np.float32)
    d_last = {name: rng.normal(size=a.shape).astype(np.float32) for name, a in last.store.items()}
    expected, d_first = pullback(d_out.astype(np.float64), all_wide(d_last))

    outs, pullbacks = [], []
    for start, stop in pairwise(cuts):
        part = {name: a[:, start:stop] for name, a in x.items()}
        piece, cache, back = mechanism.extend_vjp(cache, **part, backend=("cupy", "portable"))
        outs.append(piece)
        pullbacks.append((start, stop, back))
    d_state, result = d_last, []
    for start, stop, back in reversed(pullbacks):
        gradients, d_state = back(d_out[:, start:stop], d_state)
        result.insert(0, gradients)
    assert error(np.concatenate(outs, axis=1), out, least=1) < 2e-6
    for name, state in last.store.items():
        assert error(cache.store[name], state, least=1) < 2e-6
        assert error(d_state[name], d_first[name], least=1) < 4e-6
    for name, gradient in expected.items():
        parts = np.concatenate([each[name] for each in result], axis=1)
        assert error(parts, gradient, least=1) < 4e-6, name


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("gate", "k_heads", "erase_heads"), [("key", 4, 1), ("head", 1, 2), ("key", 2, 4)]
)
def test_a_scan_with_fewer_heads_of_keys_and_gates_that_forget_all(gate, k_heads, erase_heads):
    """Outputs, states and gradients, with an initial state and the gradient of the last one."""
    x, state = stream(9, gate, t=3, b=1, m=4, d=5)
    x.g[:, :, [0, 3, 4], ::2] = -np.inf
    given = x._replace(k=x.k[:, :k_heads], erase=x.erase[:, :erase_heads])
    k, erase = (np.repeat(a, 4 // a.shape[1], axis=1) for a in (given.k, given.erase))
    x = x._replace(k=k, erase=erase, g=np.where(np.isinf(x.g), -1e4, x.g))
    expected, expected_last = recurrent(x, state)
    rng = np.random.default_rng(0)
    d_o, d_last = rng.normal(size=expected.shape), rng.normal(size=state.shape)
    exact = recurrent_vjp(x, state, 3 * d_o, d_last)
    narrow = Stream(*(None if a is None else a.astype(np.float32) for a in given))
    first, form = state.astype(np.float32), Scan(scale=3.0)
    with checked():
        out, last = form.forward(narrow, first)
        d = form.vjp(narrow, first, d_o.astype(np.float32), d_last.astype(np.float32))
    assert_close(out, 3 * expected, 2e-6)
    assert_close(last, expected_last, 2e-6)
    assert_close(d.state, exact.state, 2e-6)
    for name, gradient in exact.stream._asdict().items():
        if gradient is not None:
            assert_close(getattr(d.stream, name), gradient, 2e-6)
