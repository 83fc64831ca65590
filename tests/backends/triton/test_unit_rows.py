"""Rows of unit length in Triton, in the interpreter."""

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn_triton.backend import Triton
from tests.backends.triton.tiles import small_tiles


@pytest.mark.parametrize("detach", [True, False])
def test_an_eps_whose_reciprocal_is_infinite_counts_as_zero(detach):
    torch.manual_seed(0)
    o, d_y = torch.randn(2, 1, 4, 2, 8)
    o[:, 1] = 0
    results = []
    for eps in (1e-45, 0.0):
        rows = o.clone().requires_grad_()
        with small_tiles():
            y = pa.UnitRows(detach=detach, eps=eps)(rows, backend=Triton.name)
            results.append((y.detach(), *torch.autograd.grad(y, rows, d_y)))
    for result, expected in zip(*results, strict=True):
        assert result.isfinite().all()
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
