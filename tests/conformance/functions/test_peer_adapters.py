"""Adapters of peers change inputs only in ways that the peer's function undoes."""

import pytest

from precondattn_conformance.peers.arrays import equally_wide_by_default
from precondattn_conformance.peers.mlstm_kernels import before_sigmoid

torch = pytest.importorskip("torch")


def test_a_gate_comes_back_from_its_number_before_the_sigmoid_with_derivative_one():
    g = torch.tensor([0.0, -1e-30, -1e-4, -0.47, -19.7, -1e4], requires_grad=True)
    back = torch.nn.functional.logsigmoid(before_sigmoid(g))
    torch.testing.assert_close(back, g, rtol=1e-5, atol=1e-20)
    (gradient,) = torch.autograd.grad(back.sum(), g)
    torch.testing.assert_close(gradient, torch.ones(6), rtol=1e-5, atol=0)


@pytest.mark.parametrize("e", [4, 24])
def test_widened_queries_have_the_logits_that_they_had(e):
    q, k = torch.randn(2, 1, 3, 2, 16, dtype=torch.float64)
    wide_q, wide_k, wide_v = equally_wide_by_default(q, k, torch.randn(1, 3, 2, e))
    width = max(16, e)
    assert {x.shape[-1] for x in (wide_q, wide_k, wide_v)} == {width}
    logits, wide = ((a * b).sum(-1) for a, b in ((q, k), (wide_q, wide_k)))
    torch.testing.assert_close(wide * width**-0.5, logits * 16**-0.5)
