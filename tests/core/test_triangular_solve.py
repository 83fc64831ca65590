"""The triangular solves of the oracle: their values, derivatives and transforms."""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from precondattn.spec.array_functions import solve_lower, solve_upper

SOLVE = {
    "lower": (solve_lower, np.tril(np.ones((5, 5)))),
    "upper": (solve_upper, np.triu(np.ones((5, 5)))),
}


def system(keep):
    """Matrices (2, 3, 5, 5), the same for three heads, and right sides (2, 3, 5, 2)."""
    rng = np.random.default_rng(0)
    return np.eye(5) + keep * rng.normal(size=(2, 1, 5, 5)), rng.normal(size=(2, 3, 5, 2))


@pytest.mark.parametrize("triangle", SOLVE)
def test_of_torch(triangle):
    torch = pytest.importorskip("torch")
    from torch.autograd import forward_ad, gradcheck, gradgradcheck

    function, keep = SOLVE[triangle]
    matrix, right = (torch.tensor(x, requires_grad=True) for x in system(keep))
    keep = torch.tensor(keep)

    def solve(matrix, right):
        return function(keep * matrix, right)

    expected = torch.linalg.solve(matrix, right)
    assert gradcheck(solve, (matrix, right), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(solve, (matrix, right))
    compiled = torch.compile(solve, backend="aot_eager", fullgraph=True)
    mapped = torch.vmap(solve, in_dims=(None, 0))(matrix, torch.stack([right, 2 * right]))
    for result in (solve(matrix, right), compiled(matrix, right), mapped[0], mapped[1] / 2):
        torch.testing.assert_close(result, expected)
    with forward_ad.dual_level():
        dual = solve(matrix, forward_ad.make_dual(right, right.detach()))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, expected)


@pytest.mark.parametrize("triangle", SOLVE)
def test_of_jax(triangle):
    jax = pytest.importorskip("jax")
    from jax.test_util import check_grads

    with jax.enable_x64(True):
        function, keep = SOLVE[triangle]
        matrix, right = (jax.numpy.asarray(x) for x in system(keep))

        def solve(matrix, right):
            return function(keep * matrix, right)

        expected = np.linalg.solve(matrix, right)
        check_grads(solve, (matrix, right), order=2, modes=("fwd", "rev"))
        both = jax.numpy.stack([right, 2 * right])
        mapped = jax.vmap(partial(jax.jit(solve), matrix))(both)
        for result in (solve(matrix, right), mapped[0], mapped[1] / 2):
            np.testing.assert_allclose(result, expected, atol=1e-12)


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
def test_gradients_of_many_tokens_with_several_threads():
    """Calls of the reference return whatever PyTorch's number of threads is."""
    pytest.importorskip("torch")
    subprocess.run([sys.executable, "-c", GRADIENTS, "path"], check=True, timeout=120)
