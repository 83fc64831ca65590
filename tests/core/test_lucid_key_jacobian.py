"""∂o/∂k of LUCID in closed form, against its gradient, which is derived another way.

Everything is float64. Norms of the derivative are up to 10³ where keys are 0, by 1 / √eps.
"""

import re
from dataclasses import replace

import numpy as np
import pytest

import precondattn as pa
from precondattn.diagnostics import jacobian_norms, lucid_key_jacobian
from tests.core.in_every_library import LIBRARIES, assert_same_in
from tests.mathematics.identities import assert_close

RNG = np.random.default_rng(0)
B, S, N, D, E = 2, 7, 2, 3, 2
Q = RNG.normal(size=(B, S, 2 * N, D))
K, V = RNG.normal(size=(B, S, N, D)), RNG.normal(size=(B, S, N, E))
BETA = RNG.uniform(0, 2, size=(B, S, N))


def keys(kind):
    k = K.copy()
    if kind == "clustered":
        k = K[:, np.arange(S) % 2] + 0.1 * K
    elif kind == "duplicate":
        k[:, 3] = k[:, 1]
        k[:, 5] = -2 * k[:, 1]
    elif kind == "equal":
        k = np.broadcast_to(K[:, :1], K.shape).copy()
    elif kind == "zero":
        k[:, [0, 4]] = 0
    return k


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
@pytest.mark.parametrize("kind", ["random", "clustered", "duplicate", "equal", "zero"])
def test_the_closed_form_is_the_gradient_of_every_output(attn, kind):
    k, inputs = keys(kind), {"lucid_beta": BETA} if attn.beta else {}
    parts = lucid_key_jacobian(attn, Q, k, V, **inputs)
    expected = by_gradient(attn, Q, k, V, **inputs)
    assert_close(sum(parts), expected, size=1 + np.abs(expected).max())
    assert np.abs(expected).max() > 0.05


def test_its_norm_is_that_of_the_diagnostic_for_any_mechanism():
    whole = sum(lucid_key_jacobian(pa.Lucid(), Q, K, V))
    norms = jacobian_norms(pa.Lucid(), Q, K, V, of=("k",))["k"]
    assert_close(np.sqrt(np.sum(whole**2, axis=(3, 4, 5))), norms)


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


def test_with_fewer_queries_than_keys_it_is_that_of_the_last_tokens():
    whole = lucid_key_jacobian(pa.Lucid(), Q, K, V)
    for part, last in zip(whole, lucid_key_jacobian(pa.Lucid(), Q[:, -2:], K, V), strict=True):
        assert_close(last, part[:, -2:])


def test_no_key_acts_on_an_earlier_output():
    for part in lucid_key_jacobian(pa.Lucid(), Q, K, V):
        for t in range(S):
            assert np.all(part[:, t, ..., t + 1 :, :] == 0)


def test_softmax_ignores_a_shift_of_all_keys_and_phi_their_lengths():
    attn = pa.Lucid(eps=0)
    softmax, phi = lucid_key_jacobian(attn, Q, K, V)
    assert_close(softmax.sum(axis=-2), np.zeros((*softmax.shape[:4], D)), size=1)
    of_heads = np.repeat(K, 2, axis=2).transpose(0, 2, 1, 3)[:, None, :, None]
    assert_close((phi * of_heads).sum(axis=-1), np.zeros(phi.shape[:-1]), size=1)


def test_where_softmax_is_one_hot_only_the_part_through_phi_is_left():
    sharp = replace(pa.Lucid(scale=D**-0.5), base=pa.Softmax(scale=1e5))
    softmax, phi = lucid_key_jacobian(sharp, Q, keys("clustered"), V)
    _, pullback = sharp.vjp(Q, keys("clustered"), V)
    assert np.abs(softmax[:, 1:]).max() < 1e-9
    assert np.abs(pullback(V.repeat(2, axis=2))["q"]).max() < 1e-9
    assert np.abs(phi).max() > 0.1


def test_equal_keys_do_not_act_through_phi():
    """Φ is stationary where two keys have one direction."""
    _, phi = lucid_key_jacobian(pa.Lucid(eps=0), Q, keys("equal"), V)
    assert_close(phi, np.zeros(phi.shape), size=1)


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_library_has_the_same_numbers(library):
    def both(q, k, v, beta):
        return sum(lucid_key_jacobian(pa.Lucid(beta=True), q, k, v, beta))

    assert_same_in(library, both, Q[:, -1:], K, V, BETA)


def test_half_precision_gives_float32():
    half = [x.astype(np.float16) for x in (Q, K, V)]
    assert all(part.dtype == np.float32 for part in lucid_key_jacobian(pa.Lucid(), *half))


@pytest.mark.parametrize(
    ("attn", "error", "message"),
    [
        (pa.Softmax(), TypeError, "attn must be a Lucid; found"),
        (pa.Lucid(normalize="rows"), ValueError, "normalize='keys'; found 'rows'"),
        (pa.Lucid(pa.Softmax(bias=True)), ValueError, "found softmax[bias=true]"),
        (pa.Lucid(pa.Softmax(causal=False)), ValueError, "found softmax[causal=false]"),
        (pa.Lucid(pa.Path()), ValueError, "found path"),
    ],
)
def test_a_mechanism_with_another_formula_is_refused_by_name(attn, error, message):
    with pytest.raises(error, match=re.escape(message)):
        lucid_key_jacobian(attn, Q, K, V)


def test_bad_arrays_are_refused_as_in_a_call():
    with pytest.raises(ValueError, match="d"):
        lucid_key_jacobian(pa.Lucid(), Q, K[..., :2], V)
    with pytest.raises(TypeError, match="lucid_beta"):
        lucid_key_jacobian(pa.Lucid(beta=True), Q, K, V)
