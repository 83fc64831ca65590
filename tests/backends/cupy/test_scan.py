"""The CUDA recurrence against the definition, simulated: gates of key channels and of heads.

The delta rule erases with another key than it writes with.
"""

import numpy as np
import pytest

import precondattn as pa
from precondattn.spec.recurrence import Stream, recurrent, recurrent_vjp
from precondattn_cupy.recurrence import scan
from precondattn_cupy.recurrence.scan import Scan
from precondattn_kernel_tools.cuda_simulator import checked
from tests.backends.cupy.simulated import DTYPES, ORDERS
from tests.backends.cupy.test_recurrences import (
    BACKENDS,
    BOUNDS,
    check,
    check_splits,
    check_token,
    problem,
)
from tests.backends.cupy.test_recurrences import unwritten_is_nan as unwritten_is_nan
from tests.backends.portable.test_erase_keys import assert_close, stream
from tests.kernel_tools.toolchain import needs_simulator

# Thorough: the first test of each kernel compiles it for the simulator, which takes seconds.
pytestmark = [needs_simulator, pytest.mark.thorough]


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    monkeypatch.setattr(scan, "SEGMENT", 4)


def in_float32(x):
    return Stream(*(None if a is None else a.astype(np.float32) for a in x))


def assert_exact(x, given, state, order=None):
    """Outputs, states and gradients of `given`, whose heads `x` has repeated."""
    expected, expected_last = recurrent(x, state)
    rng = np.random.default_rng(0)
    d_o, d_last = rng.normal(size=expected.shape), rng.normal(size=state.shape)
    exact = recurrent_vjp(x, state, 3 * d_o, d_last)
    first = state.astype(np.float32)
    form = Scan(scale=3.0)
    with checked(order):
        out, last = form.forward(in_float32(given), first)
        d = form.vjp(in_float32(given), first, d_o.astype(np.float32), d_last.astype(np.float32))
    assert_close(out, 3 * expected, 2e-6)
    assert_close(last, expected_last, 2e-6)
    assert_close(d.state, exact.state, 2e-6)
    for name, gradient in exact.stream._asdict().items():
        if gradient is not None:
            assert_close(getattr(d.stream, name), gradient, 2e-6)


@pytest.mark.thorough(but=("key-1-1-20-5-True", "key-1-1-20-5-False", "head-1-1-20-5-True"))
@pytest.mark.parametrize("erases", [False, True])
@pytest.mark.parametrize(
    ("s", "t", "d", "e"), [(9, 9, 5, 3), (8, 3, 40, 35), (1, 1, 20, 5), (3, 3, 200, 5)]
)
@pytest.mark.parametrize("gate", ["key", "head"])
def test_tokens_are_those_of_the_definition(gate, s, t, d, e, erases):
    x, state = stream(s, gate, t, b=1, d=d, e=e)
    x = x if erases else x._replace(erase=None)
    assert_exact(x, x, state)


@pytest.mark.parametrize("gate", ["key", "head"])
def test_additive_states(gate):
    x, state = stream(6, gate, b=2, d=5)
    x = x._replace(beta=None, erase=None)
    assert_exact(x, x, state)


@pytest.mark.parametrize("gate", ["key", "head"])
@pytest.mark.parametrize("order", ORDERS[1:])
def test_any_order_of_blocks_and_threads(order, gate):
    x, state = stream(5, gate, b=1, m=1, d=5, e=35)
    assert_exact(x, x, state, order)


@pytest.mark.parametrize("gate", ["key", "head"])
@pytest.mark.parametrize(("k_heads", "erase_heads"), [(4, 1), (1, 2), (2, 4)])
def test_keys_and_erase_keys_may_have_fewer_heads_than_the_state(k_heads, erase_heads, gate):
    x, state = stream(5, gate, m=4)
    given = x._replace(k=x.k[:, :k_heads], erase=x.erase[:, :erase_heads])
    k, erase = (np.repeat(a, 4 // a.shape[1], axis=1) for a in (given.k, given.erase))
    assert_exact(x._replace(k=k, erase=erase), given, state)


def test_closed_gates_of_heads_forget():
    x, state = stream(9, "head", b=1)
    x.g[:, :, [0, 3, 4]] = -np.inf
    exact = x._replace(g=np.where(np.isinf(x.g), -1e4, x.g))
    assert_exact(exact, x, state)


def test_closed_gates_forget_without_overflow():
    x, state = stream(9, "key", b=1, d=6)
    x.g[:, :, [0, 3, 4], ::2] = -np.inf
    x.g[:, :, [2, 5, 8], 1::2] = -50
    exact = x._replace(g=np.where(np.isinf(x.g), -1e4, x.g))
    assert_exact(exact, x, state)


def inputs(layer, t, **sizes):
    x = problem(layer, t, **sizes)
    x |= {name: np.abs(np.tanh(x[name])) for name in ("beta_atk", "beta") if name in x}
    return x | {name: -0.3 * np.abs(x[name]) for name in ("g_atk",) if name in x}


@pytest.mark.thorough(but=("kda-6-float32", "atk(kda)-5-float32"))
@pytest.mark.parametrize(
    ("expression", "t", "dtype"),
    [
        *(("kda", 6, dtype) for dtype in BOUNDS),
        *(("atk(kda)", 5, dtype) for dtype in BOUNDS),
        ("gla", 5, "bfloat16"),
        ("kda", 1, "float32"),
        *(("atk(delta)", 7, dtype) for dtype in ("bfloat16", "float16")),
        ("atk", 9, "float32"),
        ("atk", 1, "float32"),
        ("atk[learned=true]", 9, "float32"),
    ],
)
def test_mechanisms_run_by_the_kernels(expression, t, dtype):
    layer = pa.parse(expression)
    x = inputs(layer, t)
    assert set(layer.explain(**x, backend=BACKENDS).backends) == {"cupy"}
    check(layer, x, dtype, bound=1e-5 if dtype == "float32" else None)


@pytest.mark.parametrize("expression", ["kda", "atk(kda)"])
def test_padding_and_other_segments_have_no_effect(expression):
    layer = pa.parse(expression)
    x = inputs(layer, 7, heads=(1, 1), b=2)
    check(layer, x, bound=1e-5, segment_ids=np.array([[0, 0, 0, 1, 1, 2, 2], [1] * 7]))
    for array in x.values():
        array[1, 3:] = np.nan
    check(layer, x, bound=1e-5, lengths=np.array([7, 3]))


@pytest.mark.parametrize("expression", ["kda", "atk(kda)"])
def test_a_split_continues_the_state_and_its_gradient(expression):
    layer = pa.parse(expression)
    check_splits(layer, inputs(layer, 7), (0, 1, 6, 7))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("expression", ["kda", "atk(kda)"])
def test_a_token_reads_and_writes_the_state_once(expression, dtype):
    layer = pa.parse(expression)
    x = inputs(layer, 1, e=40, heads=(2, 4), b=2)
    x["g"][:, :, 0, ::2] = -1e4
    check_token(layer, {name: array.astype(DTYPES[dtype]) for name, array in x.items()}, dtype)
