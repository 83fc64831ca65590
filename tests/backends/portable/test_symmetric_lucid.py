"""The symmetric solve without a factorization, over several blocks of rows."""

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_portable import symmetric_lucid

EXPRESSION = "lucid[normalize=queries_and_keys,rho=0.1](softmax[causal=false,bias=true])"
PACKED = np.repeat([0, 1, 2], [5, 21, 14])[None]


@pytest.mark.parametrize("masks", [{}, {"segment_ids": PACKED}], ids=["whole", "packed"])
def test_blocks_of_rows_that_begin_at_the_first_key_and_later(masks, small_blocks, monkeypatch):
    # Segments are not computed as a batch if there is a bias of pairs: a block has the keys of its
    # segments, of which the first is not key 0.
    monkeypatch.setattr(symmetric_lucid, "DIRECT", 4)
    mechanism = pa.parse(EXPRESSION)
    x = make_inputs(mechanism, CallLayout("test", b=1, t=40, s=40, h=2, n=2), "clustered")
    out, pullback = mechanism.vjp(**x, **masks, backend="portable")
    expected, expected_pullback = mechanism.vjp(**x, **masks, backend="reference")
    np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-11)
    cotangent = np.random.default_rng(0).normal(size=out.shape)
    gradients = pullback(cotangent)
    for name, gradient in expected_pullback(cotangent).items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=1e-8, atol=1e-10, err_msg=name)
