"""Calls of the reference return whatever PyTorch's number of threads is."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

SOLVES = ["lucid", "path"]

GRADIENTS = """
import sys
import torch
import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs

m = pa.parse(sys.argv[1])
x = make_inputs(m, CallLayout("long", b=1, t=160, s=160, h=2), "clustered")
expected, pullback = m.vjp(**x, backend="reference")
cotangent = torch.tensor(expected)
expected = pullback(expected)
for threads in (1, 2, 4):
    torch.set_num_threads(threads)
    leaves = {name: torch.tensor(array, requires_grad=True) for name, array in x.items()}
    out = m(**leaves, backend="reference")
    gradients = torch.autograd.grad(out, list(leaves.values()), cotangent)
    for name, gradient in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(gradient, torch.tensor(expected[name]), rtol=1e-9, atol=1e-9)
"""
"""A program that does not return, or raises an error, with `torch.linalg.solve`."""


@pytest.mark.thorough
@pytest.mark.parametrize("expression", SOLVES)
def test_gradients_of_many_tokens_with_several_threads(expression):
    subprocess.run([sys.executable, "-c", GRADIENTS, expression], check=True, timeout=120)
