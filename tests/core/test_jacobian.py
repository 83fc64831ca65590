"""The norm of the Jacobian of an output with respect to inputs, and ∂o/∂k of LUCID in closed form.

Closed forms of softmax attention and of LASER (Eq. 5 and 7) are computed here with NumPy; others
by gradients, by central differences, and by PyTorch's autograd through the definition.
"""

from dataclasses import replace

import numpy as np
import pytest

import precondattn as pa
from precondattn.diagnostics import jacobian_norms, lucid_key_jacobian
from precondattn_conformance.inputs import CallLayout, make_inputs
from tests.mathematics.attention_problems import logits
from tests.mathematics.identities import assert_close, causal_mask

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
every_kind = pytest.mark.parametrize("k", KEYS.values(), ids=KEYS)


@pytest.mark.parametrize("laser", [False, True])
@every_kind
def test_norms_of_softmax_and_laser_are_closed_forms(k, laser):
    """∂o_c/∂s_j is a_j (v_jc − o_c), and for LASER w_jc − a_j with w_jc = a_j exp(v_jc − o_c)."""
    q, v = Q[:, -3:], V
    scores = logits(q, k)
    scores[..., ~causal_mask(3, 5)] = -np.inf
    a = np.exp(scores)
    a /= a.sum(-1, keepdims=True)
    attn = pa.Laser() if laser else pa.Softmax()
    found = jacobian_norms(attn, q, k, v, of=("q", "k", "v"))
    for b, t, h in np.ndindex(2, 3, 4):
        keys, values, of = k[b, :, h // 2], v[b, :, h // 2], a[b, h, t, :, None]
        if laser:
            posterior = of * np.exp(values)
            posterior /= posterior.sum(0)
            by_score, by_value = posterior - of, posterior
        else:
            by_score, by_value = of * (values - np.sum(of * values, axis=0)), np.tile(of, 2)
        by_score = by_score / np.sqrt(3)
        expected = {
            "q": np.linalg.norm(by_score.T @ keys),
            "k": np.linalg.norm(by_score) * np.linalg.norm(q[b, t, h]),
            "v": np.linalg.norm(by_value),
        }
        for name, norm in expected.items():
            assert_close(found[name][b, t, h], norm, size=1)


@every_kind
def test_norms_of_lucid_are_those_by_autograd_through_the_definition(k):
    torch = pytest.importorskip("torch")
    found = jacobian_norms(pa.Lucid(), Q, k, V)

    def lucid(q, k, v):  # LUCID for one sequence and head.
        unit = 3**0.5 * k / (k.square().sum(-1, keepdim=True) + 3e-6).sqrt()
        phi = torch.exp(unit @ unit.T / 3**0.5 - 3**0.5).tril(-1)
        y = torch.linalg.solve(torch.eye(5, dtype=torch.float64) + phi, v)
        masked = (q @ k.T / 3**0.5).masked_fill(torch.ones(5, 5).triu(1) > 0, -torch.inf)
        return masked.softmax(-1) @ y

    for b, h in np.ndindex(2, 4):
        one = [torch.asarray(x) for x in (Q[b, :, h], k[b, :, h // 2], V[b, :, h // 2])]
        jacobians = torch.autograd.functional.jacobian(lucid, tuple(one))
        for name, jacobian in zip("qk", jacobians, strict=False):
            expected = jacobian.square().sum((1, 2, 3)).sqrt().numpy()
            assert_close(found[name][b, :, h], expected, size=np.abs(expected).max() + 1)


@pytest.mark.parametrize(
    "text", ["gated_delta", "ccq(gla)", "differential", "row_normalized", "gsa"]
)
def test_norms_of_other_mechanisms_are_those_by_central_differences(text):
    m, step = pa.parse(text), 1e-5
    x = make_inputs(m, CallLayout("test", b=1, t=4, s=4, d=3, e=2), "clustered")
    found = jacobian_norms(m, **x)
    # The row norm's lengths are constant for its gradient.
    base = m.base if text == "row_normalized" else m
    lengths = np.linalg.norm(base(**x), axis=-1) if text == "row_normalized" else 1
    for name in ("q", "k"):
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


# ----------------------------------------------------------------------------- ∂o/∂k of LUCID


def by_gradient(attn, q, k, v, **inputs):
    """∂o/∂k (b, t, h, e, s, d), one gradient for each output of a sequence."""
    out, pullback = attn.vjp(q, k, v, **inputs)
    _, t, h, e = out.shape
    rows = []
    for index in np.ndindex(t, h, e):
        cotangent = np.zeros_like(out)
        cotangent[:, *index] = 1
        rows.append(pullback(cotangent)["k"][:, :, index[1] * k.shape[2] // h])
    return np.stack(rows, axis=1).reshape(k.shape[0], t, h, e, *k.shape[1::2])


ATTNS = {
    "default": pa.Lucid(),
    "eps=0": pa.Lucid(eps=0),
    "beta": pa.Lucid(beta=True),
    "window, scales": pa.Lucid(pa.Softmax(window=4, scale=0.8), scale=0.4),
}


@pytest.mark.parametrize("attn", ATTNS.values(), ids=ATTNS)
@every_kind
def test_the_closed_form_is_the_gradient_of_every_output(attn, k):
    inputs = {"lucid_beta": BETA} if attn.beta else {}
    parts = lucid_key_jacobian(attn, Q, k, V, **inputs)
    expected = by_gradient(attn, Q, k, V, **inputs)
    assert_close(sum(parts), expected, size=1 + np.abs(expected).max())
    assert np.abs(expected).max() > 0.05
    for part in parts:
        for t in range(S):
            assert np.all(part[:, t, ..., t + 1 :, :] == 0)
    last = lucid_key_jacobian(attn, Q[:, -2:], k, V, **inputs)
    for some, part in zip(last, parts, strict=True):
        assert_close(some, part[:, -2:], size=1 + np.abs(part).max())


def test_both_parts_agree_with_central_differences():
    """A change of keys in softmax alone, and in Φ alone."""
    attn, step = pa.Lucid(), 1e-5
    direction = RNG.normal(size=K.shape)
    y = attn.solve()

    def difference(f):
        return (f(K + step * direction) - f(K - step * direction)) / (2 * step)

    expected = (
        difference(lambda k: pa.softmax(Q, k, y(K, V))),
        difference(lambda k: pa.softmax(Q, K, y(k, V))),
    )
    group = np.repeat(direction, 2, axis=2)
    for part, along in zip(lucid_key_jacobian(attn, Q, K, V), expected, strict=True):
        found = np.einsum("bthesd,bshd->bthe", part, group)
        assert np.abs(along).max() > 0.01
        np.testing.assert_allclose(found, along, atol=1e-9)


def test_softmax_ignores_a_shift_of_all_keys_and_phi_their_lengths():
    softmax, phi = lucid_key_jacobian(pa.Lucid(eps=0), Q, K, V)
    assert_close(softmax.sum(axis=-2), np.zeros((*softmax.shape[:4], D)), size=1)
    of_heads = np.repeat(K, 2, axis=2).transpose(0, 2, 1, 3)[:, None, :, None]
    assert_close((phi * of_heads).sum(axis=-1), np.zeros(phi.shape[:-1]), size=1)
    # Φ is stationary where two keys have one direction.
    _, phi = lucid_key_jacobian(pa.Lucid(eps=0), Q, KEYS["equal"], V)
    assert_close(phi, np.zeros(phi.shape), size=1)


def test_where_softmax_is_one_hot_only_the_part_through_phi_is_left():
    sharp = replace(pa.Lucid(scale=D**-0.5), base=pa.Softmax(scale=1e5))
    softmax, phi = lucid_key_jacobian(sharp, Q, KEYS["clustered"], V)
    _, pullback = sharp.vjp(Q, KEYS["clustered"], V)
    assert np.abs(softmax[:, 1:]).max() < 1e-9
    assert np.abs(pullback(V.repeat(2, axis=2))["q"]).max() < 1e-9
    assert np.abs(phi).max() > 0.1
