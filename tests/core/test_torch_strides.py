"""PyTorch's fused attention reads rows in one piece of memory; values may have any strides."""

import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa


@pytest.mark.parametrize("d", [4, 6])
@pytest.mark.parametrize("expression", ["softmax", "laser"])
def test_values_whose_tokens_are_contiguous(expression, d):
    """As those of a triangular solve are; their width is that of the keys, or is padded."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 5, 3, d), torch.randn(1, 5, 3, d), torch.randn(1, 5, 3, 4)
    strided = v.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert strided.stride(1) == 1
    m = pa.parse(expression)
    (out, pull), (expected, pull_expected) = (m.vjp(q, k, a, backend="torch") for a in (strided, v))
    torch.testing.assert_close(out, expected)
    for name, gradient in pull(out).items():
        torch.testing.assert_close(gradient, pull_expected(out)[name])
