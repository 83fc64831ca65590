"""Bidirectional recurrences: autograd sees the masks of both directions."""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.problems import Problem


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_a_masked_key_is_masked_in_the_gradient_of_autograd_too(library):
    pytest.importorskip(library)
    base = pa.parse("retention")
    attn, inputs = pa.Bidirectional(base), Problem(s=7, n=2, group=2).x(base)
    seen = np.asarray([[True, False, True, True, False, True, True]] * 2)
    out, pullback = attn.vjp(**inputs, key_mask=seen)
    expected = pullback(np.ones_like(out))
    if library == "torch":
        import torch

        x = {name: torch.tensor(a, requires_grad=True) for name, a in inputs.items()}
        attn(**x, key_mask=torch.tensor(seen)).sum().backward()
        gradients = {name: a.grad.numpy() for name, a in x.items()}
    else:
        import jax

        with jax.enable_x64(True):
            x = {name: jax.numpy.asarray(a) for name, a in inputs.items()}
            masked = jax.numpy.asarray(seen)
            gradients = jax.grad(lambda x: attn(**x, key_mask=masked).sum())(x)
    for name, gradient in expected.items():
        np.testing.assert_allclose(np.asarray(gradients[name]), gradient, atol=1e-12)
