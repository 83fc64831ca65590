"""The sizes of terms that cancel, against which the error of their sum is measured."""

from __future__ import annotations

import numpy as np
import pytest

from precondattn_conformance.cancellation import (
    sizes_of_feature_maps,
    sizes_of_one_query,
    sizes_of_terms,
)
from precondattn_conformance.declared import mechanism_of
from precondattn_conformance.disagreement import DisagreementError, agree
from precondattn_conformance.tolerance import error

B, T, H = 2, 5, 2


def inputs_of(mechanism):
    rng = np.random.default_rng(0)
    sizes = {"b": B, "t": T, "s": T, "h": H, "n": H, "u": H, "d": 4, "e": 3}
    x = {name: rng.normal(size=p.shape(sizes)) for name, p in mechanism.inputs.items()}
    return {n: 0.1 + np.abs(a) if n in ("tau", "lam") else a for n, a in x.items()}


@pytest.mark.parametrize("masks", [{}, {"lengths": np.asarray([3, 5])}])
@pytest.mark.parametrize(
    ("expression", "name"),
    [
        ("temperature", "tau"),
        ("qk_norm(temperature)", "tau"),
        ("differential", "lam"),
        ("differential[per=head](lucid)", "lam"),
        ("differential(temperature)", "tau"),
        ("tempered", "tau"),
        ("difference", "lam"),
    ],
)
def test_terms_are_the_gradient_of_each_row_alone(expression, name, masks):
    # τ and λ of one token change only that token's row of the output.
    mechanism = mechanism_of(expression)
    x = inputs_of(mechanism)
    out, pullback = mechanism.vjp(**x, **masks, backend="reference")
    cotangent = np.where(np.isfinite(out), np.random.default_rng(1).normal(size=out.shape), 0.0)
    terms = np.zeros(x[name].shape)
    for b, t, h in np.ndindex(B, T, H):
        row = np.zeros_like(cotangent)
        row[b, t, h] = cotangent[b, t, h]
        terms += np.abs(pullback(row)[name])
    sizes = sizes_of_terms(mechanism, x, cotangent, masks)
    np.testing.assert_allclose(sizes[name], np.max(terms), rtol=1e-12)
    assert np.max(np.abs(pullback(cotangent)[name])) < np.max(terms)


def test_the_parts_of_the_values_gradient_in_a_difference():
    # With equal queries and keys in both maps, and λ near 1, the parts cancel.
    mechanism = mechanism_of("differential")
    x = inputs_of(mechanism)
    x |= {"q2": x["q"], "k2": x["k"], "lam": np.asarray(0.999)}
    cotangent = np.random.default_rng(1).normal(size=(B, T, H, 3))
    _, pullback = mechanism.vjp(**x, backend="reference")
    _, pullback_of_first = mechanism_of("softmax").vjp(x["q"], x["k"], x["v"], backend="reference")
    size = np.max(sizes_of_terms(mechanism, x, cotangent, {})["v"])
    first = pullback_of_first(cotangent)["v"]
    np.testing.assert_allclose(size, np.max(np.abs(first)), rtol=1e-12)
    assert np.max(np.abs(pullback(cotangent)["v"])) < 0.01 * size


def test_the_terms_of_a_feature_map_are_those_of_the_sum_over_features():
    mechanism = mechanism_of("hedgehog_map")
    x = inputs_of(mechanism)
    cotangent = np.ones((B, T, H, 8)) + 1e-3 * np.random.default_rng(1).normal(size=(B, T, H, 8))
    out, pullback = mechanism.vjp(**x, backend="reference")
    sizes, gradients = sizes_of_feature_maps(mechanism, x, cotangent, {}), pullback(cotangent)
    for name in x:
        assert np.max(np.abs(gradients[name])) < 1e-2 * sizes[name]
        # Without cancellation, gradients and sizes are equal except for signs.
        alone = np.where(np.arange(8) == 3, 1.0, 0.0) * np.ones_like(out)
        assert np.max(np.abs(pullback(alone)[name])) <= 2 * sizes[name]


@pytest.mark.parametrize("expression", ["linear", "delta[scale=0.3]", "gated_delta"])
def test_a_single_query_that_is_orthogonal_to_a_key_leaves_only_rounding(expression):
    mechanism = mechanism_of(expression)
    rng = np.random.default_rng(0)
    sizes = {"b": 1, "t": 1, "s": 1, "h": 1, "n": 1, "u": 1, "d": 256, "e": 3}
    x = {name: rng.normal(size=p.shape(sizes)) for name, p in mechanism.inputs.items()}
    x |= {name: np.ones_like(x[name]) for name in ("beta", "g") if name in x}
    k = x["k"] = x["k"] / np.linalg.vector_norm(x["k"])
    x["q"] = (x["q"] - np.sum(x["q"] * k) * k).astype(np.float32).astype(np.float64)
    cotangent = np.ones((1, 1, 1, 3))
    d_v = mechanism.vjp(**x, backend="reference")[1](cotangent)["v"]
    size = sizes_of_one_query(mechanism, x, cotangent)["v"]
    rounded = {name: a.astype(np.float32) for name, a in x.items()}
    found = mechanism.vjp(**rounded, backend="reference")[1](cotangent.astype(np.float32))["v"]
    assert error(found, d_v) > 1e-2
    assert error(found, d_v, size) < 1e-6
    # If all terms have one sign, they are at most √d times as large.
    q = x["q"][0, 0, 0]
    np.testing.assert_allclose(
        size * 256**0.5, mechanism.scale_for(256) * np.linalg.vector_norm(q), rtol=1e-12
    )


@pytest.mark.parametrize("size", [1e-310, 1e-200, 1.0, 1e200])
def test_errors_are_relative_where_squares_underflow_or_overflow(size):
    expected = size * np.asarray([1.0, -2.0, 3.0])
    assert error(expected, expected) == 0.0
    found = error(expected * np.asarray([1.0, 1.0, 1.0 + 1e-3]), expected)
    np.testing.assert_allclose(found, 1e-3, rtol=0.05)


def test_a_result_that_is_not_finite_is_shown_also_where_the_expected_is_not():
    expected = np.asarray([[1.0, np.inf], [2.0, np.inf]])
    found = np.asarray([[1.0, np.inf], [2.0, np.nan]])
    with pytest.raises(DisagreementError, match="nan found, inf expected"):
        agree("the output", found, expected, 1e-5, axes="te")
