"""Device functions by themselves, and rows of unit length, in Triton's interpreter."""

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

import precondattn as pa
from precondattn_triton import unit_rows
from precondattn_triton.backend import Triton
from precondattn_triton.recurrence.channel_decay import between, sums_over
from precondattn_triton.tiles import heads
from precondattn_triton.triangular_inverse import unit_lower_inverse
from tests.backends.triton.tiles import error, small_tiles


@triton.jit
def inverse(strict, result, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(result + at, unit_lower_inverse(tl.load(strict + at), SIZE, LEVELS, "ieee"))


@triton.jit
def gates_to_the_middle(g, result, level, SIZE: tl.constexpr):
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    sums = sums_over(between(i, j, level), tl.load(g + i * SIZE + j), True, "tf32")
    tl.store(result + i * SIZE + j, sums)


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("noise", [0.1, 0.0])
def test_an_inverse_of_32_tokens_is_accurate(noise):
    """The Neumann series by repeated doubling would lose all digits of these clustered keys."""
    k = torch.nn.functional.normalize(1 + noise * drawn(32, 12), dim=-1)
    strict = torch.tril(2 * k @ k.T, -1)
    result = torch.full((32, 32), torch.nan)
    with small_tiles():
        inverse[(1,)](strict, result, 32, 5)
    system = torch.eye(32).double() + strict.double()
    # The bound of float32 rounding; the error within it depends on the CPU's order of summation.
    bound = torch.linalg.cond(system) * 2.0**-24
    assert error(result, torch.linalg.inv(system)) < bound < 1e-4


@pytest.mark.parametrize("level", [0, 2, 3])
def test_a_sum_of_gates_has_the_digits_of_two_numbers_in_bfloat16(level):
    g = -torch.rand((16, 16), generator=torch.Generator().manual_seed(0))
    result = torch.full((16, 16), torch.nan)
    with small_tiles():
        gates_to_the_middle[(1,)](g, result, level, 16)
    blocks = g.double().reshape(-1, 2, 2**level, 16)
    first = blocks[:, 0].flip(1).cumsum(1).flip(1) - blocks[:, 0]
    expected = torch.stack((first, blocks[:, 1].cumsum(1)), 1).reshape(16, 16)
    assert error(result, expected) < 2.0**-15


def of_rows(leaf, o, d_y, backend=Triton.name):
    rows = o.clone().requires_grad_()
    with small_tiles():
        y = leaf(rows, backend=backend)
        return y.detach(), *torch.autograd.grad(y, rows, d_y)


@pytest.mark.parametrize("detach", [True, False])
def test_rows_about_as_long_as_eps_or_zero(detach):
    o, d_y = drawn(2, 1, 24, 2, 8)
    o *= torch.linspace(0.05, 1.0, 24)[:, None, None]
    leaf = pa.UnitRows(detach=detach, eps=1.0)
    expected = of_rows(leaf, o.double(), d_y.double(), "reference")
    assert 0.2 < (o.norm(dim=-1) > 1).double().mean() < 0.8
    for result, exact in zip(of_rows(leaf, o, d_y), expected, strict=True):
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-6)
    # An eps whose reciprocal is infinite counts as 0.
    o[:, 1] = 0
    tiny, zero = (of_rows(pa.UnitRows(detach=detach, eps=eps), o, d_y) for eps in (1e-45, 0.0))
    for result, exact in zip(tiny, zero, strict=True):
        assert result.isfinite().all()
        assert torch.equal(result, exact)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_rows_whose_squares_overflow_or_vanish(size):
    y = pa.UnitRows(eps=0)(size * drawn(1, 4, 2, 8), backend=Triton.name)
    torch.testing.assert_close(y.norm(dim=-1), torch.ones(1, 4, 2))


def test_the_gradient_has_no_row_after_the_last():
    o, d_y = drawn(2, 1, 3, 1, 4)
    whole = torch.full((4, 4), 7.0)
    sizes = unit_rows.RowSizes(3, 3, 1, 4)
    unit_rows.unit_rows_vjp[(1,)](
        heads(o), heads(d_y), whole[:3], sizes, 1e-6, DETACH=True, ROWS=4, WIDTH=4
    )
    assert (whole[3] == 7).all()
    assert (whole[:3] != 7).any()
