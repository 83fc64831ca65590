"""Numbers at the edges of their range, and masks beside a bias, a long window or half precision."""

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.extremes import EXTREMES, at_an_extreme, makes_sense
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_conformance.libraries import named
from tests.core.inputs import inputs_of
from tests.representatives import CACHED, CALLED


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1e2, 1e4, 1e8])
def test_weights_sum_to_one_whatever_the_size_of_the_logits(size, dtype):
    """Tied logits are the hard case: log 4 is lost beside 1e8 in float32."""
    ones = np.ones((1, 4, 1, 4), dtype=dtype)
    q, zero = size * ones, np.zeros(4, dtype=dtype)
    allowed = {"float32": 1e-6, "float64": 1e-14}[dtype]
    features = pa.HedgehogMap()(q, weight=np.eye(4, dtype=dtype), bias=zero)
    assert np.abs(features.sum(axis=-1) - 1).max() <= allowed
    still = {"w": ones / 2, "beta": 0 * ones[..., 0]}
    emptied = {"s": ones, "g": np.full_like(ones, -np.inf)}
    for constant in (
        pa.softmax(q, ones, ones),
        pa.laser(q, ones, ones),
        pa.path(q, ones, ones, **still),
        pa.gsa(q, ones, ones, **emptied),
    ):
        assert np.abs(constant - 1).max() <= allowed


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_rows_of_any_size_have_length_1(size, dtype):
    x = size * np.random.default_rng(0).normal(size=(1, 3, 2, 5)).astype(dtype)
    ones = np.ones((1, 1, 1, 4))
    np.testing.assert_allclose(pa.L2Norm(eps=1e-6)(1e-3 * ones), 1e-3 / np.sqrt(4e-6 + 1e-6))
    norm = pa.L2Norm(eps=0)
    y, pullback = norm.vjp(0 * x)
    assert not y.any()
    assert np.all(np.isfinite(pullback(y + 1)["x"]))
    y, pullback = norm.vjp(x)
    assert np.abs(np.linalg.vector_norm(y, axis=-1) - 1).max() <= 1e-6
    gradient = pullback(y + 1)["x"]
    expected = (1 - y * y.sum(axis=-1, keepdims=True)) / np.linalg.norm(
        x.astype(np.float64), axis=-1, keepdims=True
    )
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


BACKENDS = [("numpy", "portable"), ("torch", "torch"), ("jax", "jax"), ("numpy", "reference")]
HIGH = {"float32": 100.0, "float64": 800.0}
"""Exponentials of these overflow."""


@pytest.mark.thorough(but=("torch-torch-float32", "torch-torch-float64"))
@pytest.mark.parametrize("dtype", HIGH)
@pytest.mark.parametrize(("library", "backend"), BACKENDS)
def test_lasers_gradient_beside_outputs_of_0_and_across_segments(library, backend, dtype):
    """Padded queries, and those before the first one of PaTH, have the output 0."""
    pytest.importorskip(library)
    library = named(library)
    rng = np.random.default_rng(0)
    padded = {"lengths": np.asarray([2])}
    packed = {"segment_ids": np.asarray([[0, 0, 0, 1, 1]])}
    for m, tokens, values, masks in (
        (pa.Laser(), 5, [1.0, 1.0, 1.0, 1.0, 1.0], padded),
        (pa.Laser(), 5, [1.0, -1.0, 1.0, 1.0, -1.0], padded),
        (pa.Laser(), 5, [0.0, 0.0, 0.0, 2.0, 2.0], packed),
        (pa.Laser(pa.Path()), 2, [1.0, -1.0, 1.0, -1.0, 1.0], {}),
    ):
        x = inputs_of(m, b=1, t=tokens, s=5, h=1, n=1, d=2, e=1)
        x["v"] = rng.normal(size=x["v"].shape) + HIGH[dtype] * np.reshape(values, (1, 5, 1, 1))
        x = {name: array.astype(dtype).astype(np.float64) for name, array in x.items()}
        expected, pullback = m.vjp(**x, **masks, backend="reference")
        with library.precision(dtype):
            arrays = {name: library.array(array, dtype) for name, array in x.items()}
            given = {name: library.array(array) for name, array in masks.items()}
            _, gradients = m.vjp(**arrays, **given, backend=backend)
            gradients = gradients(library.array(np.ones(expected.shape), dtype))
        for name, gradient in pullback(np.ones(expected.shape)).items():
            np.testing.assert_allclose(library.numpy(gradients[name]), gradient, atol=5e-5)


@pytest.mark.parametrize(
    ("library", "backend", "text"),
    [
        *((*BACKENDS[0], "softmax"), (*BACKENDS[0], "laser"), (*BACKENDS[1], "path")),
        *((*BACKENDS[1], "softmax[sink=true]"), (*BACKENDS[2], "laser"), (*BACKENDS[3], "path")),
    ],
)
def test_gradients_of_scores_of_1e15_in_float32(library, backend, text):
    """The rounding of such a score exceeds 10⁷; all weight is on one key."""
    pytest.importorskip(library)
    library, m = named(library), pa.parse(text)
    x = inputs_of(m, b=1, t=300, h=2, d=24, e=24)
    x = {n: ((10**7.5 if n in "qk" else 1) * a).astype(np.float32) for n, a in x.items()}
    out, pullback = m.vjp(**{n: a.astype(np.float64) for n, a in x.items()}, backend="reference")
    with library.precision("float32"):
        arrays = {name: library.array(array, "float32") for name, array in x.items()}
        gradients = m.vjp(**arrays, backend=backend)[1](library.array(out, "float32"))
    assert all(np.isfinite(library.numpy(d)).all() for d in gradients.values())
    np.testing.assert_allclose(library.numpy(gradients["v"]), pullback(out)["v"], atol=1e-5)


@pytest.mark.parametrize(
    ("library", "backend", "normalize"),
    [
        *(("numpy", "reference", "rows"), ("numpy", None, "none")),
        *(("torch", None, "rows"), ("jax", None, "none")),
    ],
)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_a_system_that_exceeds_the_range_is_not_finite_and_affects_no_other_sequence(
    library, backend, normalize
):
    """The diagonal of the third row is exp(1 − 2) in units of the size, for keys 1, 2, 1, 1."""
    asarray = pytest.importorskip("jax.numpy" if library == "jax" else library).asarray
    v = np.ones((2, 4, 1, 1), dtype=np.float32)
    k = np.asarray([[40, 80, 40, 40], [1, 2, 1, 1]], np.float32).reshape(v.shape)
    solve = pa.LucidSolve(normalize=normalize)

    def results(k, v):
        out, pullback = solve.vjp(asarray(k), asarray(v), backend=backend)
        gradients = pullback(asarray(np.ones_like(v)))
        return [np.asarray(out), np.asarray(gradients["k"]), np.asarray(gradients["v"])]

    together = results(k, v)
    assert not np.isfinite(together[0][0, 2:]).any()
    if backend == "reference":
        assert np.isfinite(together[0][0, :1]).all()
    for both, alone in zip(together, results(k[1:], v[1:]), strict=True):
        np.testing.assert_allclose(both[1:], alone, rtol=1e-6)


@pytest.mark.thorough(but=[f"None-{text}" for text in ("softmax", "path", "mlstm", "kda")])
@pytest.mark.parametrize("text", CALLED)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_finite_results_raise_no_floating_point_error(text, backend):
    """Underflow is meant. A result that exceeds the range is reported, as NumPy's are."""
    m = pa.parse(text)

    def results(x):
        for masks in ({}, {"lengths": [70, 2]}):
            out, pullback = m.vjp(**x, **masks, backend=backend)
            yield from (out, *pullback(np.ones_like(out)).values())
        if text in CACHED and "bias" not in x:
            cache = m.init_cache(**x, capacity=70)
            yield m.extend(cache, **x, backend=backend)[0]
            if m.recurrence is not None:
                out, _, pullback = m.extend_vjp(cache, **x, backend=backend)
                yield from pullback(np.ones_like(out))[0].values()

    for kind in ("random", *EXTREMES):
        if kind == "random" or makes_sense(m, kind):
            x = at_an_extreme(m, CallLayout("strict", t=70, s=70), kind, "float32")
            x = {name: array.astype(np.float32) for name, array in x.items()}
            with np.errstate(all="ignore"):
                is_finite = all(np.isfinite(array).all() for array in results(x))
            with np.errstate(all="raise" if is_finite else "ignore"):
                list(results(x))


LAYOUT = CallLayout("test", b=2, t=6, s=6)


def test_a_padded_block_as_long_as_the_cache_uses_the_bias_of_past_keys():
    m = pa.Softmax(bias=True)
    x = make_inputs(m, CallLayout("test", b=1, t=4, s=4), "random")
    expected = m(**x)
    cache = m.init_cache(**{name: x[name] for name in "qkv"}, capacity=4)
    for done in range(4):
        # One token, in a block of four of which three are padding.
        block = {name: np.roll(x[name], -done, axis=1) for name in "qkv"}
        bias = np.roll(x["bias"], -done, axis=2)
        out, cache = m.extend(cache, **block, bias=bias, lengths=[1])
        np.testing.assert_allclose(out[:, 0], expected[:, done], rtol=1e-10)


@pytest.mark.parametrize(
    ("library", "window"),
    [("numpy", 2**31 - 1), ("numpy", 2**40), ("torch", 2**40), ("jax", 2**31)],
)
def test_a_window_above_the_sequence_is_no_window(library, window):
    xp = pytest.importorskip({"jax": "jax.numpy"}.get(library, library))
    for m, windowed in (
        (pa.Softmax(causal=False), pa.Softmax(causal=False, window=window)),
        (pa.Lucid(), pa.Lucid(pa.Softmax(window=window))),
        (pa.Path(), pa.Path(window=window)),
    ):
        x = make_inputs(m, LAYOUT, "clustered")
        arrays = {name: xp.asarray(array.astype(np.float32)) for name, array in x.items()}
        np.testing.assert_array_equal(np.asarray(windowed(**arrays)), np.asarray(m(**arrays)))
        assert str(windowed) == str(m)


@pytest.mark.parametrize(
    ("backend", "dtype", "expression", "masks"),
    [
        ("portable", "float16", "lucid(laser)", {"lengths": [6, 3]}),
        ("portable", "bfloat16", "ccq(gated_delta)", {"segment_ids": [[0, 1, 1, 1, 2, 2]] * 2}),
        ("reference", "bfloat16", "lucid(laser)", {"key_mask": np.arange(12).reshape(2, 6) != 4}),
        ("reference", "float16", "ccq(gated_delta)", {}),
    ],
)
def test_half_precision_of_numpy_is_that_of_the_inputs_and_outputs(
    backend, dtype, expression, masks
):
    m, masks = pa.parse(expression), {name: np.asarray(mask) for name, mask in masks.items()}
    dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), dtype, dtype))
    x = {n: a.astype(dtype) for n, a in make_inputs(m, LAYOUT, "clustered").items()}
    out, pullback = m.vjp(**x, **masks, backend=backend)
    gradients = pullback(out)
    assert {out.dtype, *(d.dtype for d in gradients.values())} == {dtype}
    wide = {name: array.astype(np.float64) for name, array in x.items()}
    expected, pullback = m.vjp(**wide, **masks, backend="reference")
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=2e-2, atol=2e-2)
    for name, d in pullback(out.astype(np.float64)).items():
        np.testing.assert_allclose(gradients[name].astype(np.float64), d, rtol=2e-2, atol=5e-2)
