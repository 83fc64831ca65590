"""Memory: values of PyTorch's fused attention may have any strides; outputs are contiguous."""

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs
from tests.representatives import CACHED, CALLED


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


@pytest.mark.thorough(but=["path", "ccq", "gated_delta", "softmax[bias=true]"])
@pytest.mark.parametrize("text", CALLED)
def test_outputs_are_contiguous(text):
    """As `out.view(b, t, h * e)` needs them, whatever the length, the gradient and the verb."""
    m, grad = pa.parse(text), {"requires_grad": True}
    for t in (1, 2, 8, 64, 65, 130):
        x = make_inputs(m, CallLayout("layout", t=t, s=t), "random")
        packed = {"segment_ids": [[i // 5 for i in range(t)]] * 2}
        for asarray, named in ((np.asarray, {}), (torch.tensor, {}), (torch.tensor, grad)):
            given = {name: asarray(array, **named) for name, array in x.items()}
            for masks in ({}, {"lengths": [t, (t + 1) // 2]}, packed):
                masks = {name: asarray(mask) for name, mask in masks.items()}
                outs = [m(**given, **masks), m.vjp(**given, **masks)[0]]
                if text in CACHED and "bias" not in x and "segment_ids" not in masks:
                    cache = m.init_cache(**given, capacity=t)
                    outs.append(m.extend(cache, **given, **masks)[0])
                for out in outs:
                    is_torch = isinstance(out, torch.Tensor)
                    assert out.is_contiguous() if is_torch else out.flags.c_contiguous, (t, masks)
