"""Mamba-2 (arXiv 2405.21060) by its own arguments, against its recurrence token by token.

S_t = e^{Δ_t A} S_{t−1} + Δ_t B_t x_tᵀ and y_t = S_tᵀ C_t + D x_t, where Δ is dt + bias, then
softplus of it, then clipped. Everything is float64, and an identity has to hold to 1e-10 of the
largest number involved. The definition is written in PyTorch, for gradients by autograd of it.
"""

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.identities import assert_close, part

sampled = settings(max_examples=10, deadline=None, database=None)
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


# The definition


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
@sampled
@given(x=problems())
def test_output_is_that_of_the_recurrence(options, x):
    x = varied(x, options)
    out = pa.mamba2(**x, **options)
    assert_is(out, definition(**in_torch(x), **options))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@sampled
@given(x=problems())
def test_gradients_are_those_of_the_recurrence(options, x):
    x = varied(x, options)
    ends = []
    for function in (pa.mamba2, definition):
        leaves = in_torch(x, requires_grad=True)
        out = function(**leaves, **options)
        cotangent = torch.tensor(np.random.default_rng(1).normal(size=out.shape))
        ends.append(torch.autograd.grad(torch.sum(out * cotangent), [*leaves.values()]))
    for result, expected in zip(*ends, strict=True):
        assert_is(result, expected)


def test_gradients_follow_from_the_pullback_of_ssd():
    """dx = Δ dv + D dO, dΔ = x·dv + A dg, dA = Σ Δ dg, dD = Σ x·dO; no autograd in between."""
    x = problem(without=["dt_bias"])
    leaves = in_torch(x, requires_grad=True)
    out = definition(**leaves)
    cotangent = np.random.default_rng(1).normal(size=out.shape)
    torch.sum(out * torch.tensor(cotangent)).backward()
    inputs = pa.mamba2_inputs(**{name: x[name] for name in ("x", "dt", "A", "B", "C")})
    _, pullback = pa.SSD().vjp(**inputs)
    g = pullback(cotangent)
    result = {
        "x": x["dt"][..., None] * g["v"] + x["D"][:, None] * cotangent,
        "dt": np.sum(x["x"] * g["v"], axis=-1) + x["A"] * g["g"],
        "A": np.sum(x["dt"] * g["g"], axis=(0, 1)),
        "B": g["k"],
        "C": g["q"],
        "D": np.sum(x["x"] * cotangent, axis=(0, 1, 3)),
    }
    for name, gradient in result.items():
        assert_is(gradient, leaves[name].grad)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@sampled
@given(x=problems())
def test_mamba2_is_ssd_with_mapped_inputs(options, x):
    """q = C, k = B, v = Δ x, g = Δ A, which is not above 0."""
    x = varied(x, options)
    given = {name: array for name, array in x.items() if name != "D"}
    inputs = pa.mamba2_inputs(**given, **options)
    bias = x.get("dt_bias")
    delta = steps(torch.tensor(x["dt"]), None if bias is None else torch.tensor(bias), **options)
    delta = delta.numpy()
    expected = {"q": x["C"], "k": x["B"], "v": delta[..., None] * x["x"], "g": delta * x["A"]}
    assert set(inputs) == set(expected)
    for name, array in expected.items():
        assert_close(inputs[name], array)
    assert np.all(inputs["g"] <= 0)
    skip = x["D"][:, None] * x["x"] if "D" in x else 0
    assert_close(pa.SSD()(**inputs) + skip, pa.mamba2(**x, **options), size=100)


@sampled
@given(problems())
def test_groups_are_shared_by_consecutive_heads(x):
    u = x["x"].shape[2]
    repeated = {name: np.repeat(x[name], u // x[name].shape[2], axis=2) for name in "BC"}
    out = pa.mamba2(**x)
    assert_close(pa.mamba2(**(x | repeated)), out, size=1 + np.abs(out).max())


def test_with_zero_steps_only_the_skip_connection_is_left():
    x = problem()
    x["dt"] = np.broadcast_to(-x["dt_bias"], x["dt"].shape).copy()
    assert_close(pa.mamba2(**x), x["D"][:, None] * x["x"])


def test_a_step_of_zero_equals_an_absent_token():
    x = problem(without=OPTIONAL)
    x["dt"][:, 2] = 0
    kept = [0, 1, 3, 4]
    assert_close(pa.mamba2(**x)[:, kept], pa.mamba2(**part(x, kept)), size=100)


def test_a_negative_step_is_clipped_to_zero():
    """The default limits are (0, ∞), so that no gate grows."""
    x = problem(without=OPTIONAL)
    x["dt"] -= 1
    clipped = x | {"dt": np.maximum(x["dt"], 0)}
    assert np.all(pa.mamba2_inputs(**x)["g"] <= 0)
    assert_close(pa.mamba2(**x), pa.mamba2(**clipped))


def test_without_decay_it_is_linear_attention():
    x = problem(without=OPTIONAL)
    x["A"], x["dt"] = 0 * x["A"], 0 * x["dt"] + 1
    k, q = (np.repeat(x[name], 2, axis=2) for name in "BC")
    assert_close(pa.mamba2(**x), pa.Linear(scale=1.0)(q, k, x["x"]), size=100)


@pytest.mark.parametrize("dt", [-800.0, -40.0, 0.0, 40.0, 800.0])
def test_softplus_neither_overflows_nor_loses_digits(dt):
    x = problem(without=OPTIONAL)
    x["dt"] = np.full_like(x["dt"], dt)
    inputs = pa.mamba2_inputs(**x, dt_softplus=True)
    delta = np.logaddexp(0, dt)
    assert_close(inputs["g"], delta * np.broadcast_to(x["A"], x["dt"].shape))
    assert_close(inputs["v"], delta * x["x"])


@pytest.mark.parametrize("dt", [-800.0, 800.0])
def test_gradients_of_far_steps_are_finite(dt):
    x = problem(without=["dt_bias"])
    leaves = in_torch(x | {"dt": np.full_like(x["dt"], dt)}, requires_grad=True)
    pa.mamba2(**leaves, dt_softplus=True).sum().backward()
    assert all(torch.all(torch.isfinite(leaf.grad)) for leaf in leaves.values())


@pytest.mark.parametrize("cuts", [(0, 1, 2, 3, 4, 5), (0, 2, 5), (0, 4, 5)])
def test_a_cache_of_ssd_continues_it(cuts):
    x = problem()
    scan_inputs = {name: array for name, array in x.items() if name != "D"}
    inputs = pa.mamba2_inputs(**scan_inputs, dt_softplus=True)
    cache, outs = pa.SSD().init_cache(**inputs), []
    for start, stop in pairwise(cuts):
        piece = {name: a[:, start:stop] if a.ndim > 2 else a for name, a in scan_inputs.items()}
        inputs = pa.mamba2_inputs(**piece, dt_softplus=True)
        out, cache = pa.SSD().extend(cache, **inputs)
        outs.append(out)
    out = np.concatenate(outs, axis=1) + x["D"][:, None] * x["x"]
    assert_close(out, pa.mamba2(**x, dt_softplus=True), size=100)


# Libraries and dtypes


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("library", ["torch", "jax.numpy", "array_api_strict"])
def test_every_library_gives_equal_results_in_its_own_arrays(library, options):
    asarray = pytest.importorskip(library).asarray
    x = varied(problem(), options)
    arrays = {name: asarray(array) for name, array in x.items()}
    out = pa.mamba2(**arrays, **options)
    assert type(out) is type(arrays["x"])
    assert_is(np.asarray(out), definition(**in_torch(x), **options))


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


# Refusals


@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C"])
@pytest.mark.parametrize("bad", [None, [1.0], "array"], ids=["None", "list", "text"])
def test_an_input_that_is_not_an_array_is_refused_by_name(name, bad):
    with pytest.raises(TypeError, match=rf"\bmamba2: .*\b{name}\b"):
        pa.mamba2(**(problem() | {name: bad}))


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_contradicts_the_others_is_refused_by_name(name):
    """The widths of x and B are free; the width of C has to be that of B."""
    x = problem()
    named = "[BC]" if name in "BC" else name
    for wrong in (x[name][..., None], x[name][0], *([] if name == "x" else [x[name][..., :-1]])):
        with pytest.raises(pa.ShapeError, match=rf"^mamba2: {named} is declared"):
            pa.mamba2(**(x | {name: wrong}))


@pytest.mark.parametrize("name", ["dt", "B", "C"])
def test_all_inputs_must_have_the_same_number_of_tokens(name):
    x = problem()
    with pytest.raises(pa.ShapeError, match=rf"^mamba2: {name} is declared.*axis 1 \(t\)"):
        pa.mamba2(**(x | {name: x[name][:, 1:]}))


def test_the_number_of_heads_must_be_a_multiple_of_the_groups():
    x = problem(h=3)
    wider = {name: np.concatenate([x[name]] * 2, axis=2)[:, :, :4] for name in "BC"}
    with pytest.raises(pa.ShapeError, match=r"u = 6.*multiple of.*h = 4"):
        pa.mamba2(**(x | wider))


@pytest.mark.parametrize("name", SHAPES)
def test_mixed_dtypes_or_libraries_are_refused(name):
    x = problem()
    with pytest.raises(TypeError, match=rf"mamba2: .*{name}.*int64"):
        pa.mamba2(**(x | {name: x[name].astype(int)}))
    for other in (x[name].astype("float32"), torch.asarray(x[name])):
        with pytest.raises(TypeError, match=r"mamba2: inputs of one (dtype|library)"):
            pa.mamba2(**(x | {name: other}))


@pytest.mark.parametrize(
    "limit", [(1.0,), (2.0, 1.0), (-1.0, 1.0), (0.0, float("nan")), 3.0, None, ("a", "b")], ids=str
)
def test_limits_are_checked(limit):
    with pytest.raises((TypeError, ValueError), match="dt_limit"):
        pa.mamba2(**problem(), dt_limit=limit)


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match="softplus_dt"):
        pa.mamba2(**problem(), softplus_dt=True)
