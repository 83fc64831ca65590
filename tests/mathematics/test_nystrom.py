"""Nyström attention against its definition by loops, and its identities."""

import re

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.identities import assert_close


def inputs(seed=0, *, b=2, t=7, s=None, h=4, n=2, d=3, taps=0):
    rng, s = np.random.default_rng(seed), t if s is None else s
    q, k = rng.normal(size=(b, t, h, d)), rng.normal(size=(b, s, n, d))
    x = {"q": q, "k": k, "v": rng.normal(size=(b, s, n, 2))}
    return x | ({"skip": rng.normal(size=(h, taps))} if taps else {})


def softmax(x):
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def means(x, m):
    """The means of the non-empty segments ⌊i m / L⌋ of the rows i of x (L, d)."""
    segments = [i * m // len(x) for i in range(len(x))]
    return np.stack([x[np.equal(segments, j)].mean(0) for j in sorted(set(segments))])


def pseudo_inverse(a, iterations, c=None):
    z, one = a.T / (a.sum(0).max() if c is None else c), np.eye(len(a))
    for _ in range(iterations):
        x = a @ z
        z = 0.25 * z @ (13 * one - x @ (15 * one - x @ (7 * one - x)))
    return z


def by_loops(q, k, v, skip=None, *, m, iterations=6, c=None):
    out = np.zeros((*q.shape[:3], v.shape[3]))
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    for b, h in np.ndindex(len(q), q.shape[2]):
        one, keys, values = q[b, :, h], k[b, :, h // group], v[b, :, h // group]
        q_mean, k_mean = means(one, m), means(keys, m)
        f, a, r = (
            softmax(scale * x @ y.T) for x, y in ((one, k_mean), (q_mean, k_mean), (q_mean, keys))
        )
        out[b, :, h] = f @ pseudo_inverse(a, iterations, c) @ r @ values
        for tap, i in np.ndindex(0 if skip is None else skip.shape[1], len(one)):
            j = i + tap - skip.shape[1] // 2
            if 0 <= j < len(values):
                out[b, i, h] += skip[h, tap] * values[j]
    return out


@pytest.mark.parametrize("m", [1, 3, 5, 7, 9])
@pytest.mark.parametrize("taps", [0, 1, 3, 4, 20])
def test_the_output_is_that_of_the_definition(m, taps):
    x = inputs(taps=taps)
    attn = pa.Nystrom(m, skip=taps > 0)
    assert_close(attn(**x), by_loops(**x, m=m))


def test_queries_and_keys_of_other_tokens():
    x = inputs(t=5, s=11)
    assert_close(pa.nystrom(**x, landmarks=4), by_loops(**x, m=4))


@pytest.mark.parametrize("m", [3, 40])
@pytest.mark.parametrize("backend", ["reference", "portable"])
def test_equal_and_zero_keys_have_the_output_of_the_definition(m, backend):
    x = inputs(t=12)
    x["k"] = x["k"][:, np.arange(12) % 3]
    x["k"][:, ::3] = 0
    assert_close(pa.nystrom(**x, landmarks=m, backend=backend), by_loops(**x, m=m))


def test_gradients_with_masks_are_those_of_the_tokens_that_are_left():
    x = inputs(taps=3)
    attn = pa.Nystrom(3, skip=True)
    cotangent = np.random.default_rng(1).normal(size=(2, 7, 4, 2))
    gradients = attn.vjp(**x, lengths=[4, 7])[1](cotangent)
    cut = {name: a[:1, :4] if a.ndim == 4 else a for name, a in x.items()}
    alone = attn.vjp(**cut)[1](cotangent[:1, :4])
    for name in "qkv":
        assert_close(gradients[name][:1, :4], alone[name])
        assert not gradients[name][0, 4:].any()


def test_with_every_token_a_landmark_it_is_softmax():
    """Up to the error of the pseudo-inverse, to which more iterations converge."""
    x = inputs(t=16, d=8)
    exact = pa.softmax(**x, causal=False)
    errors = [
        np.abs(pa.nystrom(**x, landmarks=16, iterations=i) - exact).max() for i in (6, 12, 24)
    ]
    assert errors[0] < 0.5
    assert errors[1] < 0.1 * errors[0]
    assert errors[2] < 1e-10
    assert_close(pa.nystrom(**x, landmarks=40, iterations=24), exact)


def test_the_iteration_converges_to_the_pseudo_inverse():
    a = softmax(np.random.default_rng(0).normal(size=(5, 5)))
    assert_close(pseudo_inverse(a, 30), np.linalg.inv(a), size=np.abs(np.linalg.inv(a)).max())


def test_masked_keys_have_no_effect():
    x, attn = inputs(), pa.Nystrom(3)
    key_mask = np.ones((2, 7), dtype=bool)
    key_mask[:, [1, 4]] = False
    other = {name: a.copy() for name, a in x.items()}
    other["k"][:, [1, 4]], other["v"][:, [1, 4]] = 100.0, np.inf
    assert_close(attn(**other, key_mask=key_mask), attn(**x, key_mask=key_mask))


def test_a_landmark_whose_keys_are_all_masked_is_not_there():
    """A is then not square, and Z is its pseudo-inverse."""
    x = inputs(t=9, n=4)
    key_mask = np.ones((2, 9), dtype=bool)
    key_mask[:, 3:6] = False
    out = pa.nystrom(**x, landmarks=3, iterations=30, key_mask=key_mask)
    q, k, v = (x[name][0, :, 0] for name in "qkv")
    left = [0, 1, 2, 6, 7, 8]
    q_mean, k_mean = means(q, 3), means(k, 3)[[0, 2]]
    scale = 3**-0.5
    f, a = softmax(scale * q @ k_mean.T), softmax(scale * q_mean @ k_mean.T)
    b = softmax(scale * q_mean @ k[left].T)
    assert_close(out[0, :, 0], f @ np.linalg.pinv(a) @ b @ v[left])


def test_a_call_without_keys_is_zero():
    out = pa.nystrom(**inputs(), landmarks=3, key_mask=np.zeros((2, 7), dtype=bool))
    assert not out.any()


def test_the_start_of_the_batch_is_the_largest_column_of_all():
    x = inputs(n=4)
    k_mean = np.stack([[means(x["k"][b, :, h], 3) for h in range(4)] for b in range(2)])
    q_mean = np.stack([[means(x["q"][b, :, h], 3) for h in range(4)] for b in range(2)])
    a = softmax(3**-0.5 * q_mean @ np.swapaxes(k_mean, 2, 3))
    out = pa.nystrom(**x, landmarks=3, start="batch")
    assert_close(out, by_loops(**x, m=3, c=a.sum(2).max()))


@pytest.mark.parametrize("backend", ["reference", "portable"])
def test_a_nan_reaches_all_that_starts_from_the_same_number(backend):
    x = inputs()
    x["q"][0, 2, 0] = np.nan
    attn = pa.Nystrom(3, start="batch")
    with np.errstate(invalid="ignore"):
        out, pullback = attn.vjp(**x, backend=backend)
        gradients = pullback(np.ones_like(out))
        apart = pa.Nystrom(3)(**x, backend=backend)
    assert np.isnan(out).all()
    assert all(np.isnan(gradient).all() for gradient in gradients.values())
    assert np.isnan(apart[0, :, 0]).all()
    assert np.isfinite(apart[1]).all()


def test_what_can_not_be_the_start_of_the_batch_is_refused():
    x = inputs()
    with pytest.raises(ValueError, match="packed sequences would depend on each other"):
        pa.nystrom(**x, landmarks=3, start="batch", segment_ids=np.zeros((2, 7), dtype=int))


def test_row_normalized_makes_the_outputs_of_tokens_one_long():
    out = pa.parse("row_normalized(nystrom[landmarks=3])")(**inputs())
    assert_close(np.sum(out**2, axis=3), np.ones((2, 7, 4)))


@pytest.mark.parametrize(
    "expression",
    ["temperature(nystrom)", "qk_norm(nystrom)", "per_dim_scale(nystrom)", "differential(nystrom)"],
)
def test_what_makes_sense_is_accepted(expression):
    assert str(pa.parse(expression)) == expression


def test_a_temperature_divides_the_logits_of_all_three_kernels():
    x = inputs(d=4)
    out = pa.parse("temperature(nystrom[landmarks=3])")(**x, tau=np.asarray(2.0))
    assert_close(out, pa.nystrom(**x, landmarks=3, scale=0.25))


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("lucid(nystrom)", "one score for each pair of tokens"),
        ("laser(nystrom)", "non-negative weights that sum to one"),
        ("ccq(nystrom)", "the base is not causal"),
        ("row_normalized(row_normalized(nystrom))", "have length 1 already"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(expression, reason):
    with pytest.raises(TypeError, match=reason):
        pa.parse(expression)


def test_bad_input_is_named():
    x = inputs()
    expected = re.escape("option landmarks must be a whole number, 1 or above; found 0")
    with pytest.raises(ValueError, match=expected):
        pa.nystrom(**x, landmarks=0)
    with pytest.raises(ValueError, match="option iterations must be a whole number"):
        pa.nystrom(**x, iterations=0)
    with pytest.raises(ValueError, match="is not causal, so it can not have a cache"):
        pa.Nystrom().init_cache(**x, capacity=7)
    with pytest.raises(ValueError, match="nystrom has no option 'causal'"):
        pa.parse("nystrom[causal=true]")
    with pytest.raises(
        ValueError, match=r"to the outputs of the same tokens.*found t = 3 and s = 7"
    ):
        pa.Nystrom(skip=True)(**(inputs(t=3, s=7) | {"skip": np.ones((4, 3))}))
