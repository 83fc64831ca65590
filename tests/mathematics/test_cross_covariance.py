"""Cross-covariance and channel attention: traced segments, and tokens that are masked."""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.identities import assert_close
from tests.mathematics.problems import Problem


def inputs():
    return Problem(s=7, n=2, group=2, e=3).x(pa.CrossCovariance())


def test_segments_that_are_traced_give_the_same():
    jax = pytest.importorskip("jax")
    x = {name: array.astype(np.float32) for name, array in inputs().items()}
    ids = np.asarray([[0] * 4 + [1] * 3, [2] * 7], dtype=np.int32)

    def loss(x, ids):
        return (pa.cross_covariance(**x, segment_ids=ids, backend="reference") ** 2).sum()

    traced = jax.jit(jax.grad(loss))({n: jax.numpy.asarray(a) for n, a in x.items()}, ids)
    out, pullback = pa.CrossCovariance().vjp(**x, segment_ids=ids)
    for name, gradient in pullback(2 * out).items():
        np.testing.assert_allclose(traced[name], gradient, atol=1e-5)


@pytest.mark.parametrize("text", ["cross_covariance", "channel", "channel[scale_by=tokens]"])
def test_a_masked_token_has_no_query_either(text):
    m, x = pa.parse(text), inputs()
    x = {name: x[name] for name in m.inputs}
    key_mask = np.ones((2, 7), dtype=bool)
    key_mask[0, [1, 4]] = False
    expected = m(**x, key_mask=key_mask)
    x["q"][0, 1] = np.inf
    out = m(**x, key_mask=key_mask)
    assert_close(out, expected)
    assert not out[0, [1, 4]].any()
