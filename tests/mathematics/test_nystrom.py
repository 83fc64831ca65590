"""Nyström, cross-covariance and channel attention: few landmarks, masks, segments and NaN."""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.base_definitions import (
    KeptTokens,
    means_of_segments,
    nystrom,
    softmax,
)
from tests.mathematics.definitions import assert_is_defined, definition
from tests.mathematics.identities import assert_close
from tests.mathematics.problems import Problem


def inputs(seed=0, *, b=2, t=7, s=None, h=4, n=2, d=3, taps=0):
    rng, s = np.random.default_rng(seed), t if s is None else s
    q, k = rng.normal(size=(b, t, h, d)), rng.normal(size=(b, s, n, d))
    x = {"q": q, "k": k, "v": rng.normal(size=(b, s, n, 2))}
    return x | ({"skip": rng.normal(size=(h, taps))} if taps else {})


@pytest.mark.parametrize("m", [1, 3, 5, 7, 9])
@pytest.mark.parametrize("taps", [0, 1, 4, 20])
def test_output_and_gradients_are_those_of_the_definition(m, taps):
    attn, x = pa.Nystrom(m, skip=taps > 0), inputs(taps=taps)
    assert_is_defined(attn, x)
    if not taps:
        assert_is_defined(attn, inputs(t=5, s=11))


def test_equal_and_zero_keys_have_the_output_of_the_definition():
    x = inputs(t=12)
    x["k"] = x["k"][:, np.arange(12) % 3]
    x["k"][:, ::3] = 0
    for m in (3, 40):  # Of equal columns of A, none is the largest, so that gradients differ.
        assert_close(pa.Nystrom(m)(**x), definition(pa.Nystrom(m), x)[0].real)


def test_a_landmark_whose_keys_are_all_masked_is_not_there():
    """A is then not square, and Z is its pseudo-inverse."""
    mask = np.ones((2, 9), dtype=bool)
    mask[:, 3:6] = False
    assert_is_defined(pa.Nystrom(3, iterations=30), inputs(t=9, n=4), key_mask=mask)


def test_the_start_of_the_batch_is_the_largest_column_of_all():
    x = inputs(n=4)
    tokens, m, largest = (
        KeptTokens(np.arange(7), np.arange(7), 7),
        pa.Nystrom(3, start="batch"),
        0,
    )
    for b, h in np.ndindex(2, 4):
        q, k = (means_of_segments(x[n][b, :, h], tokens.q, 7, 3) for n in "qk")
        largest = max(largest, softmax(3**-0.5 * q @ k.T).sum(0).max())
    expected = [nystrom(m, {n: x[n][b] for n in "qkv"}, tokens, largest).real for b in range(2)]
    assert_close(m(**x), np.stack(expected))


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


def of_channels():
    return Problem(s=7, n=2, group=2, e=3).x(pa.CrossCovariance())


def test_segments_that_are_traced_give_the_same():
    jax = pytest.importorskip("jax")
    x = {name: array.astype(np.float32) for name, array in of_channels().items()}
    ids = np.asarray([[0] * 4 + [1] * 3, [2] * 7], dtype=np.int32)

    def loss(x, ids):
        return (pa.cross_covariance(**x, segment_ids=ids, backend="reference") ** 2).sum()

    traced = jax.jit(jax.grad(loss))({n: jax.numpy.asarray(a) for n, a in x.items()}, ids)
    out, pullback = pa.CrossCovariance().vjp(**x, segment_ids=ids)
    for name, gradient in pullback(2 * out).items():
        np.testing.assert_allclose(traced[name], gradient, atol=1e-5)


@pytest.mark.parametrize("text", ["cross_covariance", "channel", "channel[scale_by=tokens]"])
def test_a_masked_token_has_no_query_either(text):
    m, x = pa.parse(text), of_channels()
    x = {name: x[name] for name in m.inputs}
    key_mask = np.ones((2, 7), dtype=bool)
    key_mask[0, [1, 4]] = False
    expected = m(**x, key_mask=key_mask)
    x["q"][0, 1] = np.inf
    out = m(**x, key_mask=key_mask)
    assert_close(out, expected)
    assert not out[0, [1, 4]].any()
