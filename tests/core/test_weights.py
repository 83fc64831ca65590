"""The weights of a mechanism as a matrix: o = W v.

The formulas are computed here with NumPy, head by head, or by stepping through the recurrence.
Everything is float64, and an identity has to hold to 1e-10.
"""

import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.inputs import numbers_in_range
from tests.mathematics.attention_problems import logits
from tests.mathematics.identities import assert_close, causal_mask, grouped
from tests.representatives import CALLED

weights = pa.diagnostics.weights
NOT_LINEAR = ("lucid(laser)", "row_normalized")
SIZES = {"b": 2, "t": 5, "s": 5, "h": 4, "n": 2, "u": 4, "d": 4, "e": 3, "m": 3}


def reads_tokens(mechanism):
    """Whether v has channels that no other input has."""
    return [name for name, of in mechanism.inputs.items() if "e" in of.letters] == ["v"]


def inputs_of(mechanism):
    rng = np.random.default_rng(0)
    return {
        name: numbers_in_range(rng, pattern, pattern.shape(SIZES))
        for name, pattern in mechanism.inputs.items()
    }


def keys(kind, shape=(2, 9, 2, 3)):
    rng = np.random.default_rng(1)
    k = rng.normal(size=shape)
    if kind == "clustered":
        k = k[:, np.arange(shape[1]) % 3] + 0.01 * rng.normal(size=shape)
    elif kind == "equal":
        k[:] = k[:, :1]
    elif kind == "some zero":
        k[:, 2:5] = 0
    return k


KINDS = ("random", "clustered", "equal", "some zero")


def softmax(q, k, scale=None):
    """A of shape (b, h, t, s), causal."""
    scores = logits(q, k, scale=scale)
    scores[..., ~causal_mask(*scores.shape[-2:])] = -np.inf
    a = np.exp(scores - scores.max(-1, keepdims=True))
    return a / a.sum(-1, keepdims=True)


def lucid_inverse(k, eps=1e-6):
    """P = (I + stril Φ)⁻¹ of shape (b, n, s, s), with Φ = exp(kₙ·kₙ / √d − √d)."""
    k, d = np.moveaxis(k, 2, 1), k.shape[-1]
    unit = np.sqrt(d) * k / np.sqrt(np.sum(k * k, axis=-1, keepdims=True) + d * eps)
    phi = np.exp(unit @ unit.swapaxes(-1, -2) / np.sqrt(d) - np.sqrt(d))
    return np.linalg.inv(np.eye(k.shape[2]) + np.tril(phi, -1))


def queries(k, heads=4):
    return np.random.default_rng(2).normal(size=(*k.shape[:2], heads, k.shape[-1]))


@pytest.mark.parametrize("kind", KINDS)
def test_of_lucid_they_are_the_attention_times_the_inverse(kind):
    k = keys(kind)
    q = queries(k)
    expected = softmax(q, k) @ np.repeat(lucid_inverse(k), 2, axis=1)
    assert_close(weights(pa.Lucid(), q, k, k), expected)
    assert_close(weights(pa.Lucid(), q[:, -4:], k, k), expected[:, :, -4:])
    assert_close(weights(pa.LucidSolve(), k, k), lucid_inverse(k))


def test_of_differential_attention_they_are_the_difference():
    k, k2 = keys("clustered"), keys("random")
    q, q2, lam = queries(k), queries(k)[::-1], np.asarray([0.2, 0.5, 0.8, 1.1])
    expected = softmax(q, k) - lam[:, None, None] * softmax(q2, k2)
    attn = pa.Differential(per="head")
    assert_close(weights(attn, q, k, k, q2=q2, k2=k2, lam=lam), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_of_ccq_they_are_those_of_the_contracted_query(kind):
    k = keys(kind)
    q, contraction = queries(k), np.random.default_rng(3).uniform(size=(2, 9, 4))
    lengths = np.linalg.norm(k, axis=-1, keepdims=True)
    unit_k = k / np.where(lengths > 0, lengths, 1)
    contracted = q / np.linalg.norm(q, axis=-1, keepdims=True)
    for b, t, h in np.ndindex(2, 9, 4):
        seen = unit_k[b, : t + 1, h // 2]
        covariance = seen.T @ seen / (t + 1) - np.outer(seen.mean(0), seen.mean(0))
        contracted[b, t, h] -= contraction[b, t, h] * covariance @ contracted[b, t, h]
    for base, read in (
        (pa.Softmax(), softmax(contracted, k)),
        (pa.Linear(), np.tril(logits(contracted, k))),
    ):
        attn = pa.CCQ(base, eps=0)
        assert_close(weights(attn, q, k, k, contraction=contraction), read)


def test_of_the_gated_delta_rule_they_are_products_of_its_steps():
    """s q_tᵀ M_t ⋯ M_{j+1} β_j k_j, with M = e^g (I − β k kᵀ)."""
    k = keys("clustered")
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    rng = np.random.default_rng(3)
    q, g, beta = queries(k, 2), -rng.random((2, 9, 2)), rng.uniform(0, 2, (2, 9, 2))
    expected = np.zeros((2, 2, 9, 9))
    for b, h, j in np.ndindex(2, 2, 9):
        row = beta[b, j, h] * k[b, j, h]
        for t in range(j, 9):
            if t > j:
                row = np.exp(g[b, t, h]) * row
                row = row - beta[b, t, h] * k[b, t, h] * (k[b, t, h] @ row)
            expected[b, h, t, j] = q[b, t, h] @ row / np.sqrt(3)
    assert_close(weights(pa.GatedDelta(), q, k, k, g=g, beta=beta), expected)


@pytest.mark.parametrize(
    "text", [x for x in CALLED if x not in NOT_LINEAR and reads_tokens(pa.parse(x))]
)
def test_the_output_of_any_other_mechanism_is_its_weights_times_its_values(text):
    mechanism = pa.parse(text)
    x = inputs_of(mechanism)
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


def test_a_mechanism_that_depends_on_the_width_of_its_values_has_the_weights_at_theirs():
    @dataclass(frozen=True)
    class ByWidth(pa.TokenWise):
        name: ClassVar[str] = "by_width"
        inputs = pa.Inputs(v="b s n e")
        output = "b s n e"

        def forward(self, x, frame):
            return x["v"] / x["v"].shape[-1], ()

    try:
        matrix = weights(ByWidth(), np.ones((1, 7, 2, 3)))
        assert_close(matrix, np.broadcast_to(np.eye(7) / 3, (1, 2, 7, 7)))
    finally:
        pa.unregister_mechanism("by_width")


def test_of_no_tokens_they_are_empty():
    none = np.ones((2, 0, 2, 3))
    assert weights(pa.Softmax(causal=False), queries(K), none, none).shape == (2, 4, 9, 0)


@pytest.mark.parametrize("text", [*NOT_LINEAR, "laser", "softmax[read=mean_and_log_sum]"])
def test_an_output_that_is_not_linear_in_the_values_is_refused(text):
    mechanism = pa.parse(text)
    x = inputs_of(mechanism)
    for given in (x, x | {"v": 0 * x["v"]}):
        with pytest.raises(TypeError, match=re.escape(text) + ": its output is no matrix times"):
            weights(mechanism, **given)


def test_a_query_that_is_nan_spoils_its_row_only_and_hides_nothing():
    x = inputs_of(pa.Softmax())
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
        (
            "cross_covariance",
            r"has weights of channels and not of tokens: v is declared \(b s n d\)",
        ),
        ("stable_step(gdn2)", r"has other weights for every channel of v, by w, and no matrix"),
    ],
)
def test_weights_that_are_not_one_matrix_of_tokens_are_refused(text, message):
    mechanism = pa.parse(text)
    with pytest.raises(TypeError, match=message):
        weights(mechanism, **inputs_of(mechanism))


K = keys("equal")


def test_they_can_be_differentiated_in_pytorch():
    torch = pytest.importorskip("torch")
    q, k = (torch.asarray(x, requires_grad=True) for x in (queries(K), K))
    weights(pa.Lucid(), q, k, k).sum().backward()
    expected = pa.Lucid().vjp(queries(K), K, np.ones((2, 9, 2, 1)))[1](np.ones((2, 9, 4, 1)))
    assert_close(q.grad.numpy(), expected["q"], size=1)


def test_a_traced_call_is_refused():
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match="weights: q is traced"):
        jax.jit(lambda q: weights(pa.Softmax(), q, K, K))(K)
