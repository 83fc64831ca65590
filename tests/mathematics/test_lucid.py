"""LUCID and DeltaFormer with keys of every kind, long sequences and large scales.

With Φ_tj = exp(s kn_t·kn_j − s d) and kn the keys divided by their root mean square, the definition
is y_t = β_t (v_t − Σ_{j<t} Φ_tj y_j), read by softmax attention in place of v. P maps v to y.
Everything is float64, and an identity has to hold to 1e-10 of the largest number involved.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.definitions import assert_is_defined, normed
from tests.mathematics.identities import assert_close, causal_mask, identity_values
from tests.mathematics.problems import KEYS, Problem, keys_of, problems


def kernel(k, normalize, scale=None, eps=1e-6, window=None):
    """The matrix E of E y = v for the keys (s, d) of one head, entry by entry; β = 1."""
    s, d = k.shape
    scale = d**-0.5 if scale is None else scale
    k = normed(k, "rms", eps) if normalize in ("keys", "queries_and_keys") else k
    mask, matrix = causal_mask(s, s, window), np.zeros((s, s))
    for i in range(s):
        row = {j: scale * (k[i] @ k[j]) for j in np.flatnonzero(mask[i])}
        shift = {"none": 0.0, "rows": max(row.values())}.get(normalize, scale * d)
        for j, score in row.items():
            matrix[i, j] = np.exp(score - shift)
        if normalize in ("keys", "queries_and_keys"):
            matrix[i, i] = 1.0
    return matrix


def matrix_of(mechanism, *arrays, **named):
    """The (b, heads, t, s) matrix by which values become the output."""
    return mechanism(*arrays, identity_values(arrays[-1]), **named).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("normalize", ["keys", "rows", "none"])
@given(p=problems(longest=20, kinds=["random", "zero", "growing", "shrinking"]))
def test_solved_values_satisfy_their_equations(normalize, p):
    y = pa.LucidSolve(normalize=normalize)(p.k, p.v)
    for b, n in np.ndindex(p.k.shape[0], p.k.shape[2]):
        matrix = kernel(p.k[b, :, n], normalize)
        terms = np.abs(matrix) @ np.abs(y[b, :, n])
        assert_close((matrix @ y[b, :, n] - p.v[b, :, n]) / terms, 0.0, size=1)


# Boundedness


@pytest.mark.parametrize("kind", KEYS)
def test_the_inverse_of_many_tokens_is_bounded_and_exact(kind):
    k = keys_of(np.random.default_rng(0), kind, (1, 300, 1, 8))
    inverse, lower = matrix_of(pa.LucidSolve(), k)[0, 0], kernel(k[0, :, 0], "keys")
    assert np.abs(inverse).max() <= 1 + 1e-10
    assert np.sum(inverse**2, axis=0).max() <= 2 + 1e-10
    assert np.linalg.cond(lower) <= 300 * np.sqrt(301)
    assert_close(lower @ inverse, np.eye(300))
    assert_close(inverse @ lower, np.eye(300))


@pytest.mark.parametrize("d", [4, 64, 256])
@pytest.mark.parametrize("eps", [1e-6, 1e-3])
def test_zero_keys_keep_the_size_of_values(d, eps):
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(1, 8, 1, d)), rng.normal(size=(1, 8, 1, 3))
    k[:, [0, 3, 4]] = 0
    y = pa.LucidSolve(eps=eps)(k, v)
    assert np.linalg.norm(y) <= 4 * np.linalg.norm(v)  # √(2N), N = 8
    assert_is_defined(pa.Lucid(eps=eps), {"q": rng.normal(size=k.shape), "k": k, "v": v})


@given(problems(kinds=["random"]), st.permutations(range(8)))
def test_a_large_scale_does_not_change_values_of_distinct_directions(p, order):
    corners = np.array(list(np.ndindex(2, 2, 2)), dtype=float)[order] * 2 - 1
    s = min(8, p.k.shape[1])
    q, v = p.rng.normal(size=(2, s, 2 * p.group, 3)), p.rng.normal(size=(2, s, 2, 2))
    k = corners[:s, None] * p.rng.uniform(0.5, 2, size=(2, s, 2, 1))
    np.testing.assert_array_equal(pa.LucidSolve(scale=1e3)(k, v), v)
    assert_close(pa.Lucid(scale=1e3)(q, k, v), pa.Softmax()(q, k, v))


@pytest.mark.parametrize(
    ("normalize", "keys"),
    [("none", [0.5, 1, 2, 4, 6, 8, 10]), ("rows", [2, 10, -4, -2, 12, 6, 0, 8])],
)
def test_long_future_keys_cost_past_outputs_no_accuracy(normalize, keys):
    solve = pa.LucidSolve(normalize=normalize)
    k = np.array(keys, dtype=float).reshape(1, -1, 1, 1)
    v = np.ones_like(k)
    y = solve(k, v)
    assert_close(y[0, 0, 0, 0], {"none": np.exp(-0.25), "rows": 1.0}[normalize])
    assert_close(y[:, :4], solve(k[:, :4], v[:, :4]))


@pytest.mark.parametrize("kind", [*KEYS, "growing"])
@pytest.mark.parametrize("normalize", ["keys", "queries_and_keys", "rows", "none", None])
def test_output_and_gradient_are_those_of_the_definition_for_keys_of_every_kind(normalize, kind):
    """None stands for DeltaFormer, whose weights are those of a softmax."""
    if (normalize, kind) == ("rows", "zero"):
        kind = "random"  # Equal scores of zero keys have no one maximum.
    p = Problem(0, kind, s=9, t=9 if normalize is None else 7, n=2, group=2)
    m = pa.DeltaFormer() if normalize is None else pa.Lucid(normalize=normalize)
    times = 1.0
    if normalize in ("rows", "none") and kind == "growing":  # Values grow by the products of rows.
        times = 1 + np.abs(pa.LucidSolve(normalize=normalize)(p.k, p.v)).max()
    assert_is_defined(m, p.x(m), times)
