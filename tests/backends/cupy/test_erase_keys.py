"""The delta rule of CUDA erases with another key than it writes with, simulated.

Keys repeat, and one is 0; gates are open, closed or in between.
"""

import numpy as np
import pytest

import precondattn as pa
from precondattn.spec.recurrence import Stream, recurrent, recurrent_vjp
from precondattn_cupy.recurrence.chunkwise import Chunkwise
from precondattn_kernel_tools.cuda_simulator import checked
from tests.backends.cupy.test_recurrences import BACKENDS, check, problem, tiles
from tests.backends.cupy.test_recurrences import unwritten_is_nan as unwritten_is_nan
from tests.backends.portable.test_erase_keys import assert_close, stream
from tests.kernel_tools.toolchain import needs_simulator

pytestmark = needs_simulator


def in_float32(x):
    return Stream(*(None if a is None else a.astype(np.float32) for a in x))


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


def test_one_token_is_that_of_the_definition():
    x, state = stream(1, "head")
    with checked():
        result = Chunkwise(decays=True).forward(in_float32(x), state.astype(np.float32))
    for one, expected in zip(result, recurrent(x, state), strict=True):
        assert_close(one, expected, 1e-6)


def test_erase_keys_may_have_fewer_heads_than_the_state():
    x, state = stream(17, "head", b=1, d=4)
    x = x._replace(erase=x.erase[:, :1])
    repeated = x._replace(erase=np.repeat(x.erase, 2, axis=1))
    expected, _ = recurrent(repeated, state)
    with tiles(16), checked():
        out, _ = Chunkwise(decays=True).forward(in_float32(x), state.astype(np.float32))
    assert_close(out, expected, 1e-5)


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
