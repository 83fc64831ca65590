"""The delta rule of CUDA erases with another key than it writes with, simulated.

Keys repeat, and one is 0; gates are open, closed or in between.
"""

import numpy as np
import pytest

import precondattn as pa
from precondattn.spec.recurrence import Stream, recurrent, recurrent_vjp
from precondattn_cupy.recurrence.chunkwise import Chunkwise
from precondattn_kernel_tools.cuda_simulator import checked
from tests.backends.cupy.simulated import DTYPES, ORDERS
from tests.backends.cupy.test_recurrences import BACKENDS, BOUNDS, check, problem, tiles
from tests.backends.cupy.test_recurrences import unwritten_is_nan as unwritten_is_nan
from tests.backends.portable.test_erase_keys import assert_close, stream
from tests.kernel_tools.toolchain import needs_simulator

# Thorough: the first test of each kernel compiles it for the simulator, which takes seconds.
pytestmark = [needs_simulator, pytest.mark.thorough]


def in_float32(x):
    return Stream(*(None if a is None else a.astype(np.float32) for a in x))


@pytest.mark.thorough(but=("head-37-5-16",))
@pytest.mark.parametrize(
    ("gate", "s", "t", "chunk"), [("head", 33, 33, 32), ("none", 17, 3, 16), ("head", 37, 5, 16)]
)
def test_chunks_are_those_of_the_definition(gate, s, t, chunk):
    x, state = stream(s, gate, t, b=1, d=20)
    form, first = Chunkwise(decays=gate != "none"), state.astype(np.float32)
    expected, expected_last = recurrent(x, state)
    rng = np.random.default_rng(0)
    d_o, d_last = rng.normal(size=expected.shape), rng.normal(size=state.shape)
    with tiles(chunk), checked():
        out, last = form.forward(in_float32(x), first)
        d = form.vjp(in_float32(x), first, d_o.astype(np.float32), d_last.astype(np.float32))
    assert_close(out, expected, 1e-5)
    assert_close(last, expected_last, 1e-5)
    expected = recurrent_vjp(x, state, d_o, d_last)
    assert_close(d.state, expected.state, 1e-5)
    for name, exact in expected.stream._asdict().items():
        if exact is not None and (name != "g" or gate != "none"):
            assert_close(getattr(d.stream, name), exact, 1e-5)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_token_is_that_of_the_definition(dtype, order):
    x, state = stream(1, "head", d=20, e=40)
    x.beta[:], x.g[0] = 0.7, -1.0
    rows = {name: getattr(x, name).astype(DTYPES[dtype]) for name in ("q", "k", "v", "erase")}
    with checked(order):
        given = in_float32(x)._replace(**rows)
        o, last = Chunkwise(decays=True).forward(given, state.astype(np.float32))
    exact = x._replace(**{name: row.astype(np.float64) for name, row in rows.items()})
    expected, expected_last = recurrent(exact, state)
    assert_close(o.astype(np.float64), expected, BOUNDS[dtype])
    assert_close(last, expected_last, 2e-6)


@pytest.mark.parametrize("order", ORDERS[1:])
def test_any_order_of_blocks_and_threads_gives_the_same_numbers(order):
    x, state = stream(33, "head", b=1, d=20)
    x, first = in_float32(x), state.astype(np.float32)
    results = []
    for each in (None, order):
        with tiles(32), checked(each):
            o, last = Chunkwise(decays=True).forward(x, first)
            d = Chunkwise(decays=True).vjp(x, first, np.ones_like(o), np.ones_like(last))
        results.append((o, last, d.state, *d.stream[:6]))
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("s", [1, 17])
@pytest.mark.parametrize(("k_heads", "erase_heads"), [(4, 1), (1, 2), (2, 4)])
def test_keys_and_erase_keys_may_have_fewer_heads_than_the_state(k_heads, erase_heads, s):
    """Gradients are those of the heads of the state; a leaf sums them."""
    x, state = stream(s, "head", m=4)
    shared = x._replace(k=x.k[:, :k_heads], erase=x.erase[:, :erase_heads])
    x = x._replace(
        k=np.repeat(shared.k, 4 // k_heads, axis=1),
        erase=np.repeat(shared.erase, 4 // erase_heads, axis=1),
    )
    expected, expected_last = recurrent(x, state)
    d_o = np.random.default_rng(0).normal(size=expected.shape)
    exact = recurrent_vjp(x, state, d_o, 0 * state).stream
    first = state.astype(np.float32)
    with tiles(16), checked():
        form = Chunkwise(decays=True)
        out, last = form.forward(in_float32(shared), first)
        d = form.vjp(in_float32(shared), first, d_o.astype(np.float32), 0 * first).stream
    assert_close(out, expected, 1e-5)
    assert_close(last, expected_last, 1e-5)
    for name in ("k", "erase", "v", "g", "beta"):
        assert_close(getattr(d, name), getattr(exact, name), 1e-5)


def test_a_gate_of_minus_infinity_is_one_whose_factor_is_0():
    x, state = stream(20, "head", b=1)
    x.g[:, :, [0, 7, 15, 16]] = -1e4
    expected, _ = recurrent(x, state)
    exact = recurrent_vjp(x, state, np.ones_like(expected), np.ones_like(state)).stream
    x.g[x.g == -1e4] = -np.inf
    first = state.astype(np.float32)
    with tiles(16), checked():
        out, last = Chunkwise(decays=True).forward(in_float32(x), first)
        d = Chunkwise(decays=True).vjp(in_float32(x), first, np.ones_like(out), np.ones_like(last))
    assert_close(out, expected, 1e-5)
    for name in ("q", "k", "erase", "v", "g", "beta"):
        assert_close(getattr(d.stream, name), getattr(exact, name), 1e-5)


@pytest.mark.thorough(but=("atk[learned=true]-9-float32", "atk-33-float32"))
@pytest.mark.parametrize(
    ("expression", "t", "dtype"),
    [
        ("atk(delta)", 17, "bfloat16"),
        ("atk", 33, "float32"),
        ("atk", 17, "float16"),
        ("atk[learned=true]", 9, "float32"),
        ("atk", 1, "float32"),
    ],
)
def test_atk_runs_by_kernels(expression, t, dtype):
    layer = pa.parse(expression)
    x = problem(layer, t)
    x |= {name: np.abs(np.tanh(x[name])) for name in ("beta_atk", "beta")}
    x["g_atk"] = -0.3 * np.abs(x["g_atk"])
    assert set(layer.explain(**x, backend=BACKENDS).backends) == {"cupy"}
    check(layer, x, dtype, bound=1e-5 if dtype == "float32" else None)
