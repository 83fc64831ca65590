"""Matrices of diagnostics: weights o = W v, norms of Jacobians, row scalings."""

import re
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import pytest

import precondattn as pa
from precondattn.diagnostics import condition_number as kappa
from precondattn.diagnostics import jacobian_norms, leverage_scaling, log_mu
from tests.core.inputs import inputs_of
from tests.mathematics.identities import assert_close, grouped
from tests.representatives import CALLED

RNG = np.random.default_rng(0)
B, S, N, D, E = 2, 5, 2, 3, 2
Q = RNG.normal(size=(B, S, 2 * N, D))
K, V = RNG.normal(size=(B, S, N, D)), RNG.normal(size=(B, S, N, E))
BETA = RNG.uniform(0, 2, size=(B, S, N))
KEYS = {
    "random": K,
    "clustered": K[:, np.arange(S) % 2] + 0.1 * K,
    "duplicate": K[:, [0, 1, 2, 1, 4]] * np.asarray([1, 1, 1, -2, 1])[:, None, None],
    "equal": np.broadcast_to(K[:, :1], K.shape).copy(),
    "zero": K * np.asarray([0, 1, 1, 0, 1])[:, None, None],
}


@pytest.mark.parametrize(
    ("text", "kind", "t"),
    [
        *((text, "clustered", 4) for text in ("gated_delta", "ccq(gla)", "differential", "gsa")),
        *(("row_normalized", "clustered", 4), ("lucid", "duplicate", 4), ("lucid", "random", 3)),
        *(("softmax", "zero", 3), ("laser", "clustered", 4)),
    ],
)
def test_norms_are_those_by_central_differences(text, kind, t):
    m, step = pa.parse(text), 1e-5
    x = inputs_of(m, "numpy", kind, b=1, t=t, s=4, d=3, e=2)
    found = jacobian_norms(m, **x, of=("q", "k", "v"))
    # The row norm's lengths are constant for its gradient.
    base = m.base if text == "row_normalized" else m
    lengths = np.linalg.norm(base(**x), axis=-1) if text == "row_normalized" else 1
    for name in ("q", "k", "v"):
        squares = 0.0
        for index in np.ndindex(x[name].shape):
            ends = []
            for sign in (1, -1):
                moved = x[name].copy()
                moved[index] += sign * step
                ends.append(base(**(x | {name: moved})))
            squares += np.sum(((ends[0] - ends[1]) / (2 * step)) ** 2, axis=-1)
        expected = np.sqrt(squares) / lengths
        np.testing.assert_allclose(found[name], expected, atol=1e-7 * (1 + expected.max()))


def test_chosen_tokens_have_the_norms_of_all_and_masked_keys_have_none():
    every = jacobian_norms(pa.Lucid(), Q, K, V)
    chosen = jacobian_norms(pa.Lucid(), Q, K, V, tokens=(4, 1))
    for name, norm in every.items():
        assert norm.shape == (2, 5, 4)
        np.testing.assert_array_equal(chosen[name], norm[:, [4, 1]])
    only_first = np.arange(5)[None] < np.asarray([[1], [5]])
    masked = jacobian_norms(pa.Lucid(), Q, K, V, key_mask=only_first)
    assert np.all(masked["k"][0] == 0)  # Attention to one key does not depend on it.
    assert_close(masked["k"][1], every["k"][1])
    of_one = jacobian_norms(pa.Nystrom(2, start="batch"), Q[:1], K[:1], V[:1], tokens=(0,))
    assert of_one["q"].shape == (1, 1, 4)


weights = pa.diagnostics.weights
tokens_of = partial(inputs_of, t=5, d=4, e=3, m=3, values_per_head=1)
NOT_LINEAR = ("lucid(laser)", "row_normalized")


def reads_tokens(mechanism):
    """Whether v has channels that no other input has."""
    return [name for name, of in mechanism.inputs.items() if "e" in of.letters] == ["v"]


@pytest.mark.parametrize(
    "text", [x for x in CALLED if x not in NOT_LINEAR and reads_tokens(pa.parse(x))]
)
def test_the_output_of_any_other_mechanism_is_its_weights_times_its_values(text):
    mechanism = pa.parse(text)
    x = tokens_of(mechanism)
    key_mask = np.ones(x["v"].shape[:2], dtype=bool)
    key_mask[0, 2] = key_mask[1, 4] = False
    turns_tokens = any(isinstance(leaf, pa.ReversedTokens) for leaf in mechanism.program.leaves)
    for masks in ({},) if turns_tokens else ({}, {"key_mask": key_mask}):
        matrix, out = weights(mechanism, **x, **masks), mechanism(**x, **masks)
        b, h, t, columns = matrix.shape
        v = x["v"].reshape(b, columns, -1, x["v"].shape[-1])
        read = grouped(out, h // v.shape[2])
        by_group = matrix.reshape(b, v.shape[2], -1, t, columns)
        assert_close(np.einsum("bngts,bsne->btnge", by_group, v), read)
    if turns_tokens:
        return  # It takes no `key_mask`.
    steps = columns // key_mask.shape[1]
    for b, s in ((0, 2), (1, 4)):
        assert not np.any(matrix[b, :, :, s * steps : (s + 1) * steps])


def test_fewer_queries_have_the_last_rows_and_no_keys_no_columns():
    q, k, v = tokens_of(pa.Lucid()).values()
    every = weights(pa.Lucid(), q, k, v)
    assert_close(weights(pa.Lucid(), q[:, -2:], k, v), every[:, :, -2:])
    none = np.ones((2, 0, 2, 4))
    assert weights(pa.Softmax(causal=False), q, none, none).shape == (2, 4, 5, 0)


def test_they_are_differentiated_in_pytorch_and_refused_when_traced():
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    q, k, v = tokens_of(pa.Lucid()).values()
    leaf = torch.asarray(q, requires_grad=True)
    weights(pa.Lucid(), leaf, torch.asarray(k), torch.asarray(v)).sum().backward()
    ones = np.ones((2, 5, 2, 1))
    expected = pa.Lucid().vjp(q, k, ones)[1](np.ones((2, 5, 4, 1)))
    assert_close(leaf.grad.numpy(), expected["q"], size=1)
    with pytest.raises(TypeError, match="weights: q is traced"):
        jax.jit(lambda q: weights(pa.Softmax(), q, k, v))(q)


def test_a_mechanism_that_depends_on_the_width_of_its_values_has_the_weights_at_theirs(
    unregistered,
):
    @dataclass(frozen=True)
    class ByWidth(pa.TokenWise):
        name: ClassVar[str] = "by_width"
        inputs = pa.Inputs(v="b s n e")
        output = "b s n e"

        def forward(self, x, frame):
            return x["v"] / x["v"].shape[-1], ()

    matrix = weights(ByWidth(), np.ones((1, 7, 2, 3)))
    assert_close(matrix, np.broadcast_to(np.eye(7) / 3, (1, 2, 7, 7)))


def test_a_query_that_is_nan_spoils_its_row_only_and_hides_nothing():
    x = tokens_of(pa.Softmax())
    matrix = weights(pa.Softmax(), **x)
    x["q"][0, 3, 1] = np.nan
    spoiled = weights(pa.Softmax(), **x)
    assert np.all(np.isnan(spoiled[0, 1, 3]))
    spoiled[0, 1, 3] = matrix[0, 1, 3]
    assert_close(spoiled, matrix)
    with pytest.raises(TypeError, match="no matrix times"):
        weights(pa.Laser(), **x)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, ": its output is no matrix times") for text in (*NOT_LINEAR, "laser")),
        ("softmax[read=mean_and_log_sum]", ": its output is no matrix times"),
        ("cross_covariance", " has weights of channels and not of tokens: v is declared (b s n d)"),
        ("stable_step(gdn2)", " has other weights for every channel of v, by w, and no matrix"),
    ],
)
def test_weights_that_are_not_one_matrix_of_tokens_are_refused(text, message):
    mechanism = pa.parse(text)
    x = tokens_of(mechanism)
    for given in (x, x | {"v": 0 * x["v"]}):
        with pytest.raises(TypeError, match=re.escape(text + message)):
            weights(mechanism, **given)


def shares(a):
    """ℓ_i / k by another formula than the library's, and ‖A_i‖² / ‖A‖_F²."""
    leverage = np.diag(a @ np.linalg.pinv(a, rcond=1e-13))
    return leverage / min(a.shape), np.sum(a**2, axis=1) / np.sum(a**2)


def rows(seed, n, d):
    """Rows of very different lengths."""
    rng = np.random.default_rng(seed)
    return 10 ** rng.uniform(-2, 2, size=(n, 1)) * rng.normal(size=(n, d))


@pytest.mark.parametrize(
    ("n", "d", "nearness"), [(9, 1, 1), (20, 5, 1e-5), (5, 6, 1e-5), (12, 2, 1)]
)
def test_mu_falls_by_at_least_the_divergence_and_exactly_where_there_are_no_more_rows(
    n, d, nearness
):
    """docs/claims/row_norm.md; rounding changes log mu by eps k kappa."""
    a = rows(n, n, d)
    a[:, 0] = a[:, -1] + nearness * a[:, 0]
    rounding = 1e-13 * min(a.shape) * kappa(a)
    scaled = leverage_scaling(a)[:, None] * a
    new, old = shares(a)
    least = min(a.shape) / 2 * np.sum(new * np.log(new / old))
    fall = log_mu(a) - log_mu(scaled)
    assert least >= -1e-12
    assert fall >= least - rounding
    if n <= d:
        np.testing.assert_allclose(fall, least, atol=rounding)
        row_norm = a / np.linalg.norm(a, axis=1, keepdims=True)
        np.testing.assert_allclose(scaled, row_norm, atol=rounding)


def test_rows_get_the_root_of_their_leverage_as_length_in_every_matrix_of_a_batch():
    a = np.stack([rows(1, 8, 3), rows(2, 8, 3)])[:, None]
    length = np.linalg.norm(leverage_scaling(a)[..., None] * a, axis=-1)
    for i in range(2):
        np.testing.assert_allclose(length[i, 0] ** 2, 3 * shares(a[i, 0])[0], rtol=1e-9)


def test_rows_of_zeros_have_factor_1_and_a_missing_rank_is_not_counted():
    a = rows(0, 8, 3)
    a[2] = 0
    a[:, 2] = a[:, 0] + a[:, 1]
    factors = leverage_scaling(a)
    assert factors[2] == 1
    np.testing.assert_allclose(np.sum((factors[:, None] * a) ** 2), 2)
