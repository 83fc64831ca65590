"""Mamba-2 (arXiv 2405.21060) by its own arguments, against its recurrence token by token.

S_t = e^{Δ_t A} S_{t−1} + Δ_t B_t x_tᵀ and y_t = S_tᵀ C_t + D x_t, where Δ is dt + bias, then
softplus of it, then clipped. Everything is float64, and an identity has to hold to 1e-10 of the
largest number involved. The definition is written in PyTorch, for gradients by autograd of it.
"""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.identities import assert_close

OPTIONS = [
    {},
    {"dt_softplus": True},
    {"dt_limit": (0.2, 0.9)},
    {"dt_softplus": True, "dt_limit": (0.3, float("inf"))},
]
SHAPES = {"x": "btue", "dt": "btu", "A": "u", "B": "bthd", "C": "bthd", "D": "u", "dt_bias": "u"}
OPTIONAL = ["D", "dt_bias"]


def problem(seed=0, *, t=5, h=2, group=2, d=3, e=2, b=2, without=()):
    rng = np.random.default_rng(seed)
    sizes = {"b": b, "t": t, "h": h, "u": h * group, "d": d, "e": e}
    x = {n: rng.normal(size=[sizes[a] for a in axes]) for n, axes in SHAPES.items()}
    x["A"] = -rng.exponential(1, size=x["A"].shape)
    x["dt"] = np.abs(x["dt"])
    x["dt_bias"] = np.abs(x["dt_bias"])
    return {name: array for name, array in x.items() if name not in without}


@st.composite
def problems(draw):
    sizes = {name: draw(st.integers(1, 4)) for name in ("h", "group", "d", "e", "b")}
    without = draw(st.sets(st.sampled_from(OPTIONAL)))
    seed = draw(st.integers(0, 2**32 - 1))
    return problem(seed, t=draw(st.integers(1, 8)), without=without, **sizes)


def varied(x, options):
    """Steps of both signs if there are options: these make them positive."""
    return x | {"dt": x["dt"] - 1} if options else x


def in_torch(x, requires_grad=False):
    return {n: torch.tensor(array, requires_grad=requires_grad) for n, array in x.items()}


def steps(dt, dt_bias=None, dt_softplus=False, dt_limit=(0.0, float("inf"))):
    dt = dt if dt_bias is None else dt + dt_bias
    dt = torch.logaddexp(dt, 0 * dt) if dt_softplus else dt
    low, high = dt_limit
    return torch.where(dt < low, low, torch.where(dt > high, high, dt))


def definition(x, dt, A, B, C, D=None, **options):  # noqa: N803
    """Head i of u reads group ⌊i h / u⌋ of h."""
    delta, (b, t, u, e), (h, d) = steps(dt, **options), x.shape, B.shape[2:]
    rows = []
    for head in range(u):
        group, state, outs = head * h // u, torch.zeros(b, d, e, dtype=x.dtype), []
        for i in range(t):
            here = delta[:, i, head, None, None]
            write = B[:, i, group, :, None] * x[:, i, head, None, :]
            state = torch.exp(here * A[head]) * state + here * write
            out = torch.einsum("bde,bd->be", state, C[:, i, group])
            outs.append(out if D is None else out + D[head] * x[:, i, head])
        rows.append(torch.stack(outs, 1))
    return torch.stack(rows, 2)


def assert_is(actual, expected):
    expected = expected.detach().numpy()
    assert actual.shape == expected.shape
    assert_close(np.asarray(actual), expected, size=1 + np.abs(expected).max())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@given(x=problems())
def test_output_and_gradients_are_those_of_the_recurrence(options, x):
    x = varied(x, options)
    assert_is(pa.mamba2(**x, **options), definition(**in_torch(x), **options))
    ends = []
    for function in (pa.mamba2, definition):
        leaves = in_torch(x, requires_grad=True)
        out = function(**leaves, **options)
        cotangent = torch.tensor(np.random.default_rng(1).normal(size=out.shape))
        ends.append(torch.autograd.grad(torch.sum(out * cotangent), [*leaves.values()]))
    for result, expected in zip(*ends, strict=True):
        assert_is(result, expected)


@pytest.mark.parametrize("dt", [-800.0, -40.0, 0.0, 40.0, 800.0])
def test_softplus_neither_overflows_nor_loses_digits(dt):
    x = problem(without=OPTIONAL)
    x["dt"] = np.full_like(x["dt"], dt)
    inputs = pa.mamba2_inputs(**x, dt_softplus=True)
    delta = np.logaddexp(0, dt)
    assert_close(inputs["g"], delta * np.broadcast_to(x["A"], x["dt"].shape))
    assert_close(inputs["v"], delta * x["x"])
    leaves = in_torch(x, requires_grad=True)
    pa.mamba2(**leaves, dt_softplus=True).sum().backward()
    assert all(torch.all(torch.isfinite(leaf.grad)) for leaf in leaves.values())


def test_a_cache_of_ssd_continues_it():
    x = problem()
    scan_inputs = {name: array for name, array in x.items() if name != "D"}
    cache, outs = pa.SSD().init_cache(**pa.mamba2_inputs(**scan_inputs)), []
    for start, stop in ((0, 1), (1, 4), (4, 5)):
        piece = {name: a[:, start:stop] if a.ndim > 2 else a for name, a in scan_inputs.items()}
        inputs = pa.mamba2_inputs(**piece, dt_softplus=True)
        out, cache = pa.SSD().extend(cache, **inputs)
        outs.append(out)
    out = np.concatenate(outs, axis=1) + x["D"][:, None] * x["x"]
    assert_close(out, pa.mamba2(**x, dt_softplus=True), size=100)


@pytest.mark.parametrize("library", ["torch", "jax.numpy", "array_api_strict"])
def test_every_library_gives_equal_results_in_its_own_arrays(library):
    asarray = pytest.importorskip(library).asarray
    x = varied(problem(), OPTIONS[3])
    arrays = {name: asarray(array) for name, array in x.items()}
    out = pa.mamba2(**arrays, **OPTIONS[3])
    assert type(out) is type(arrays["x"])
    assert_is(np.asarray(out), definition(**in_torch(x), **OPTIONS[3]))


def test_jax_differentiates_and_compiles_it():
    jax = pytest.importorskip("jax")
    x = problem()
    arrays = {name: jax.numpy.asarray(array) for name, array in x.items()}

    def loss(arrays):
        return pa.mamba2(**arrays, dt_softplus=True).sum()

    leaves = in_torch(x, requires_grad=True)
    definition(**leaves, dt_softplus=True).sum().backward()
    for name, gradient in jax.jit(jax.grad(loss))(arrays).items():
        assert_is(np.asarray(gradient), leaves[name].grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wide", [[], ["dt", "A", "D", "dt_bias"]], ids=["all", "but gates"])
def test_half_precision_keeps_the_gate_in_float32(dtype, wide):
    x = in_torch(problem())
    x = {n: a.to(torch.float32 if n in wide else dtype) for n, a in x.items()}
    inputs = pa.mamba2_inputs(**{n: a for n, a in x.items() if n != "D"}, dt_softplus=True)
    assert {n: a.dtype for n, a in inputs.items()} == dict.fromkeys("qkv", dtype) | {
        "g": torch.float32
    }
    exact = {n: a.double() for n, a in x.items()}
    gate = steps(exact["dt"], exact["dt_bias"], dt_softplus=True) * exact["A"]
    assert torch.max(torch.abs(inputs["g"] - gate)) < 1e-5
    out = pa.mamba2(**x, dt_softplus=True)
    assert out.dtype == dtype
    expected = definition(**exact, dt_softplus=True)
    error = torch.max(torch.abs(out - expected)) / torch.max(torch.abs(expected))
    assert error < 8 * torch.finfo(dtype).eps


X = problem()
WRONG = [
    # Inputs and options in place of right ones, the error, and its words.
    ({"x": None}, TypeError, r"\bmamba2: .*\bx\b"),
    ({"A": [1.0]}, TypeError, r"\bmamba2: .*\bA\b"),
    ({"dt": "array"}, TypeError, r"\bmamba2: .*\bdt\b"),
    *(
        ({name: X[name][..., None]}, pa.ShapeError, f"^mamba2: {name} is declared")
        for name in "xAD"
    ),
    ({"dt": X["dt"][0]}, pa.ShapeError, "^mamba2: dt is declared"),
    ({"dt_bias": X["dt_bias"][:-1]}, pa.ShapeError, "^mamba2: dt_bias is declared"),
    ({"C": X["C"][..., :-1]}, pa.ShapeError, "^mamba2: [BC] is declared"),
    ({"B": X["B"][:, 1:]}, pa.ShapeError, r"^mamba2: B is declared.*axis 1 \(t\)"),
    ({n: X[n][:, :, [0, 1, 0]] for n in "BC"}, pa.ShapeError, r"u = 4.*multiple of.*h = 3"),
    ({"B": X["B"].astype(int)}, TypeError, r"mamba2: .*B.*int64"),
    ({"D": X["D"].astype("float32")}, TypeError, "mamba2: inputs of one dtype"),
    ({"C": torch.asarray(X["C"])}, TypeError, "mamba2: inputs of one library"),
    *(
        ({"dt_limit": limit}, (TypeError, ValueError), "dt_limit")
        for limit in ((1.0,), (2.0, 1.0), (-1.0, 1.0), (0.0, np.nan), 3.0, None, ("a", "b"))
    ),
    ({"softplus_dt": True}, TypeError, "softplus_dt"),
]


@pytest.mark.parametrize(("wrong", "error", "words"), WRONG)
def test_what_does_not_fit_is_refused_by_name(wrong, error, words):
    with pytest.raises(error, match=words):
        pa.mamba2(**(X | wrong))
