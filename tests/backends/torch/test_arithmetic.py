"""PyTorch's arithmetic, where it is not that of the other libraries."""

import math

import pytest

pytest.importorskip("torch")

import torch

from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.triangular_inverse import solve_unit_lower
from precondattn_torch.arithmetic import MANY, TORCH


@pytest.mark.parametrize("count", [MANY - 1, MANY])
def test_exponentials_of_few_and_many_numbers(count):
    x = torch.linspace(-110, 80, count)
    expected = torch.exp(x.double())
    found = TORCH.exp(x.clone()).double()
    # An exponent that is off by a rounding, |x| ε, changes the result by that share of it.
    allowed = (1 + x.abs().double()) * torch.finfo(torch.float32).eps * expected
    assert ((found - expected).abs() <= allowed + 2 * 1.5e-45).all()


def test_exponentials_of_what_is_not_finite():
    x = torch.tensor([-math.inf, math.inf, math.nan, 0.0, -200.0, 200.0]).repeat(MANY)
    found = TORCH.exp(x)[:6]
    assert found[:2].tolist() == [0.0, math.inf]
    assert found[2].isnan()
    assert found[3:].tolist() == [1.0, 0.0, math.inf]


@pytest.mark.parametrize(("base", "dtype"), [(1 / 1.5, torch.float32), (3.0, torch.float64)])
def test_powers_of_a_softsign(base, dtype):
    x = torch.linspace(-90, 90, 4001, dtype=dtype)
    expected = base ** (x.double() / (1 + x.double().abs()))
    found = TORCH.softsign_power(base, x.clone(), torch.empty_like(x)).double()
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)
    plain = Arithmetic().softsign_power(base, x, torch.empty_like(x)).double()
    torch.testing.assert_close(plain, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize(("size", "transposed"), [(1, False), (7, True), (40, False), (40, True)])
def test_triangular_systems_by_a_solver_and_by_inverses(size, transposed):
    generator = torch.Generator().manual_seed(0)
    strict = torch.rand(2, 3, size, size, generator=generator, dtype=torch.float64).tril(-1)
    right = torch.rand(2, 3, size, 5, generator=generator, dtype=torch.float64)
    matrix = torch.eye(size, dtype=torch.float64) + strict
    matrix = matrix.mT if transposed else matrix
    for ops, of in ((TORCH, torch.Tensor.clone), (Arithmetic(), torch.Tensor.numpy)):
        solved = solve_unit_lower(ops, of(strict), of(right), transposed=transposed)
        assert torch.allclose(matrix @ torch.as_tensor(solved), right, atol=1e-12)
