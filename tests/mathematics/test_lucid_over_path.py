"""LUCID over PaTH against its definition, its bounds and its gradients."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.identities import identity_values
from tests.mathematics.path_definition import (
    BETAS,
    DIRECTIONS,
    FLUSHES,
    UNIT,
    PathProblem,
    assert_close,
    assert_gradients,
    decode,
    kernel,
    lucid_by_loops,
    path_by_loops,
    problems,
    rms_norm,
    sampled,
    solve_by_loops,
    unit,
)


def solved_by_cache(layer, q, k, v, **named):
    """y (b, s, n, e), as a cache stores it."""
    cache = layer.init_cache(q, k, v, capacity=k.shape[1])
    return layer.extend(cache, q, k, v, **named)[1].store["y"]


def inverse_of(layer, k, **named):
    """P (b, n, s, s), by which LUCID maps values to solved values."""
    return solved_by_cache(layer, k, k, identity_values(k), **named).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("normalize", ["keys", "queries_and_keys", "rows", "none"])
@sampled
@given(p=problems(square=False), scales=st.tuples(*[st.none() | st.floats(0.1, 2)] * 2))
def test_lucid_is_the_definition_written_as_loops(normalize, p, scales):
    scale, lucid_scale = scales
    layer = pa.Lucid(pa.Path(scale=scale), normalize=normalize, scale=lucid_scale)
    expected = lucid_by_loops(
        **p.inputs, normalize=normalize, scale=scale, lucid_scale=lucid_scale or scale
    )
    assert_close(layer(**p.inputs), expected, size=np.abs(p.v).max() + np.abs(expected).max())


@sampled
@given(
    problems(square=False),
    st.sampled_from([0.0, 1e-6, 0.5]),
    st.none() | st.integers(1, 8),
    st.booleans(),
)
def test_lucid_with_its_own_beta_eps_window_and_gate_is_the_definition(p, eps, window, scaled):
    assume(eps > 0 or np.all(np.any(p.k != 0, axis=-1)))
    forget = "scaled" if scaled else "unscaled"
    lucid_beta = p.rng.uniform(0, 2, size=p.beta.shape)
    layer = pa.Lucid(pa.Path(window=window, forget=forget), eps=eps, beta=True)
    out = layer(**p.gated, lucid_beta=lucid_beta)
    expected = lucid_by_loops(
        **p.gated, lucid_beta=lucid_beta, eps=eps, window=window, forget=forget
    )
    assert_close(out, expected, size=np.abs(p.v).max())


@pytest.mark.parametrize("zero_input", ["w", "beta"])
@sampled
@given(p=problems(square=False))
def test_without_reflections_lucid_over_path_is_lucid(zero_input, p):
    named = {"w": p.w, "beta": p.beta} | {zero_input: 0 * getattr(p, zero_input)}
    expected = pa.Lucid()(p.q, p.k, p.v)
    out = pa.Lucid(pa.Path())(p.q, p.k, p.v, **named)
    assert_close(out, expected, size=np.abs(p.v).max())


@sampled
@given(problems(square=False))
def test_lucid_over_path_is_path_over_the_solved_values(p):
    y = solved_by_cache(pa.Lucid(pa.Path()), p.k, p.k, p.v, w=p.w, beta=p.beta)
    assert_close(y, solve_by_loops(p.k, p.v, p.w, p.beta))
    out = pa.Lucid(pa.Path())(**p.inputs)
    assert_close(out, pa.Path()(**p.inputs | {"v": y}), size=np.abs(y).max())


@sampled
@given(problems(keys=["random", "clustered", "duplicate"], grouped=False))
def test_a_normalised_query_equal_to_its_key_retrieves_its_value_scaled(p):
    kn = rms_norm(p.k, 0)
    totals = np.zeros(p.beta.shape)
    for b, n in np.ndindex(2, p.k.shape[2]):
        totals[b, :, n] = kernel(p.k[b, :, n], p.w[b, :, n], p.beta[b, :, n], eps=0).sum(-1)
    expected, named = p.v / totals[..., None], {"w": p.w, "beta": p.beta}
    size = np.abs(p.v).max()
    assert_close(pa.Lucid(pa.Path(), eps=0)(kn, kn, p.v, **named), expected, size)
    both = pa.Lucid(pa.Path(), eps=0, normalize="queries_and_keys")
    assert_close(both(p.k, p.k, p.v, **named), expected, size)


@pytest.mark.parametrize("flush", [1, 3])
@sampled
@given(p=problems(directions=UNIT, longest=20, grouped=False))
def test_unit_directions_bound_the_kernel_and_its_inverse_whatever_the_keys(flush, p):
    inverse = inverse_of(pa.Lucid(pa.Path(flush=flush)), p.k, w=p.w, beta=p.beta)
    assert np.abs(inverse).max() <= 1 + 1e-12
    assert np.sum(inverse**2, axis=-2).max() <= 2 + 1e-12
    n = inverse.shape[-1]
    assert np.linalg.cond(inverse).max() <= n * np.sqrt(n + 1) * (1 + 1e-10)
    matrix = np.linalg.inv(inverse)
    assert matrix.max() <= 1 + 1e-9
    assert np.all(matrix[..., *np.tril_indices(n)] > -1e-9)
    for b, h in np.ndindex(matrix.shape[:2]):
        expected = kernel(p.k[b, :, h], p.w[b, :, h], p.beta[b, :, h])
        assert_close(matrix[b, h], expected, size=10)


def test_long_directions_exceed_the_bound():
    k = np.ones((1, 7, 1, 2))
    w, beta = 1.1 * unit(k), np.full((1, 7, 1), 2.0)  # Factors of −1.42.
    inverse = inverse_of(pa.Lucid(pa.Path()), k, w=w, beta=beta)
    assert np.abs(inverse).max() > 10


@pytest.mark.parametrize("flush", FLUSHES)
def test_a_cache_stores_the_norm_of_the_original_key(flush):
    p = PathProblem(np.random.default_rng(0), "clustered", "keys", s=11, n=2, group=2)
    p.beta = np.full_like(p.beta, 0.5)  # Directions along the keys: they shrink by half each time.
    layer = pa.Lucid(pa.Path(flush=flush))
    out, cache = decode(layer, p.inputs, [1] * 11)
    assert_close(out, lucid_by_loops(**p.inputs))
    assert_close(out, layer(**p.inputs))
    original = np.sqrt(np.mean(p.k**2, axis=-1) + 1e-6)
    assert_close(cache.store["rms(k)"], original)
    moved = np.sqrt(np.mean(cache.store["path(k,w,beta)"][:, 0] ** 2, axis=-1))
    assert np.all(moved < 0.01 * original[:, 0])


@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize("directions", DIRECTIONS)
def test_gradient_of_lucid_is_that_of_the_definition(directions, betas):
    p = PathProblem(np.random.default_rng(0), "random", directions, betas, s=4, group=2, d=2, b=1)
    assert_gradients(pa.Lucid(pa.Path()), lucid_by_loops, p.inputs)


@pytest.mark.parametrize("keys", ["clustered", "duplicate"])
def test_gradient_of_lucid_with_every_option_is_that_of_the_definition(keys):
    p = PathProblem(np.random.default_rng(0), keys, s=4, n=2, group=2, d=3, b=1)
    options = {"window": 3, "forget": "scaled", "scale": 0.6}
    layer = pa.Lucid(pa.Path(**options), scale=0.8, beta=True)
    inputs = p.gated | {"lucid_beta": p.rng.uniform(0, 2, size=p.beta.shape)}
    assert_gradients(layer, lambda **x: lucid_by_loops(**x, lucid_scale=0.8, **options), inputs)


DOT = pa.Lucid(pa.Path(), metric="dot")


def in_dot_products_by_loops(q, k, v, w, beta):
    """PaTH of values that were solved with keys that no reflection transports."""
    return path_by_loops(q, k, solve_by_loops(k, v, 0 * w, beta), w, beta)


@sampled
@given(problems(square=False))
def test_with_the_dot_product_only_the_base_transports_keys(p):
    assert_close(DOT(**p.inputs), in_dot_products_by_loops(**p.inputs), size=np.abs(p.v).max())


def test_gradient_with_the_dot_product_is_that_of_the_definition():
    p = PathProblem(np.random.default_rng(0), s=4, group=2, d=2, b=1)
    assert_gradients(DOT, in_dot_products_by_loops, p.inputs)


@pytest.mark.parametrize("flush", FLUSHES)
def test_a_cache_with_the_dot_product_holds_both_keys(flush):
    p = PathProblem(np.random.default_rng(0), s=11, n=2, group=2)
    out, cache = decode(pa.Lucid(pa.Path(flush=flush), metric="dot"), p.inputs, [1, 4, 1, 1, 4])
    assert_close(out, in_dot_products_by_loops(**p.inputs))
    assert {"k", "path(k,w,beta)", "rms(k)", "y"} <= set(cache.store)


@pytest.mark.parametrize("backend", ["portable", "torch", "jax"])
def test_blocked_backends_compute_the_dot_product_around_path(backend):
    library = pytest.importorskip({"portable": "numpy", "jax": "jax.numpy"}.get(backend, backend))
    p = PathProblem(np.random.default_rng(0), "clustered", s=70, d=4, group=2)
    given = {name: library.asarray(x.astype("float32")) for name, x in p.inputs.items()}
    out, pullback = DOT.vjp(**given, backend=backend)
    assert_close(np.asarray(out), DOT(**p.inputs), tolerance=1e-4)
    expected = DOT.vjp(**p.inputs)[1](np.ones(out.shape))
    for name, gradient in pullback(library.ones_like(out)).items():
        assert_close(np.asarray(gradient), expected[name], tolerance=1e-3)


def test_the_dot_product_is_refused_where_it_is_the_base_s_own():
    for base in (pa.Softmax(), pa.Laser(), pa.Softmax(causal=False)):
        with pytest.raises(TypeError, match=r"path transports keys, .* none; write lucid"):
            pa.Lucid(base, metric="dot")


@pytest.mark.parametrize("normalize", ["queries_and_keys", "rows", "none"])
def test_gradient_of_every_normalisation_is_that_of_the_definition(normalize):
    p = PathProblem(np.random.default_rng(0), s=4, d=2, b=1)

    def by_loops(**inputs):
        return lucid_by_loops(**inputs, normalize=normalize)

    assert_gradients(pa.Lucid(pa.Path(), normalize=normalize), by_loops, p.inputs)
