"""Numbers at the edges of their range: weights still sum to one, rows still have length 1."""

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.extremes import EXTREMES, at_an_extreme, makes_sense
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_conformance.libraries import named
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


def test_eps_is_inside_the_root():
    x = np.full((1, 1, 1, 4), 1e-3)
    np.testing.assert_allclose(pa.L2Norm(eps=1e-6)(x), 1e-3 / np.sqrt(4e-6 + 1e-6))


BACKENDS = [("numpy", "portable"), ("torch", "torch"), ("jax", "jax"), ("numpy", "reference")]
HIGH = {"float32": 100.0, "float64": 800.0}
"""Exponentials of these overflow."""


@pytest.mark.thorough(but=("torch-torch-float32", "torch-torch-float64"))
@pytest.mark.parametrize("dtype", HIGH)
@pytest.mark.parametrize(("library", "backend"), BACKENDS)
def test_lasers_gradient_beside_outputs_of_0_and_across_segments(library, backend, dtype):
    """Padded queries, and those before the first one of PaTH, have the output 0."""
    if not named(library).is_installed():
        pytest.skip(f"{library} is not installed")
    library = named(library)
    rng = np.random.default_rng(0)
    padded = {"lengths": np.asarray([2])}
    packed = {"segment_ids": np.asarray([[0, 0, 0, 1, 1]])}
    for m, tokens, values, masks in (
        (pa.Laser(), 5, [1.0, 1.0, 1.0, 1.0, 1.0], padded),
        (pa.Laser(), 5, [-1.0, -1.0, -1.0, -1.0, -1.0], padded),
        (pa.Laser(), 5, [1.0, -1.0, 1.0, 1.0, -1.0], padded),
        (pa.Laser(), 5, [0.0, 0.0, 0.0, 2.0, 2.0], packed),
        (pa.Laser(), 5, [2.0, 2.0, 2.0, 0.0, 0.0], packed),
        (pa.Laser(pa.Path()), 2, [1.0, 1.0, 1.0, 1.0, 1.0], {}),
        (pa.Laser(pa.Path()), 2, [1.0, -1.0, 1.0, -1.0, 1.0], {}),
    ):
        x = make_inputs(m, CallLayout("high", b=1, t=tokens, s=5, h=1, n=1, d=2, e=1), "random")
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
        *((*BACKENDS[0], text) for text in ("softmax", "softmax[sink=true]", "laser", "path")),
        *((*BACKENDS[1], text) for text in ("softmax[sink=true]", "path")),
        *((*BACKENDS[2], "laser"), (*BACKENDS[3], "softmax"), (*BACKENDS[3], "path")),
    ],
)
def test_gradients_of_scores_of_1e15_in_float32(library, backend, text):
    """The rounding of such a score exceeds 10⁷; all weight is on one key."""
    pytest.importorskip(library)
    library, m = named(library), pa.parse(text)
    x = make_inputs(m, CallLayout("far", b=1, t=300, s=300, h=2, n=2, d=24, e=24), "random")
    x = {n: ((10**7.5 if n in "qk" else 1) * a).astype(np.float32) for n, a in x.items()}
    out, pullback = m.vjp(**{n: a.astype(np.float64) for n, a in x.items()}, backend="reference")
    with library.precision("float32"):
        arrays = {name: library.array(array, "float32") for name, array in x.items()}
        gradients = m.vjp(**arrays, backend=backend)[1](library.array(out, "float32"))
    assert all(np.isfinite(library.numpy(d)).all() for d in gradients.values())
    np.testing.assert_allclose(library.numpy(gradients["v"]), pullback(out)["v"], atol=1e-5)


@pytest.mark.parametrize("library", ["numpy", "array_api_strict", "torch", "jax"])
@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("normalize", ["rows", "none"])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_a_system_that_exceeds_the_range_is_not_finite_and_affects_no_other_sequence(
    normalize, backend, library
):
    """The diagonal of the third row is exp(1 − 2) in units of the size, for keys 1, 2, 1, 1."""
    asarray = pytest.importorskip("jax.numpy" if library == "jax" else library).asarray
    k = np.ones((2, 4, 1, 1), dtype=np.float32)
    k[:, 1] = 2
    k[0] *= 40
    v = np.ones((2, 4, 1, 1), dtype=np.float32)
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
