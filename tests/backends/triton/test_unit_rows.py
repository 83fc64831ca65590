"""Rows of unit length in Triton, in the interpreter."""

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn_triton import unit_rows
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


def result_and_gradient(leaf, o, d_y, backend):
    rows = o.clone().requires_grad_()
    y = leaf(rows, backend=backend)
    return y.detach(), *torch.autograd.grad(y, rows, d_y)


@pytest.mark.parametrize("detach", [True, False])
def test_rows_about_as_long_as_eps(detach):
    torch.manual_seed(0)
    o, d_y = torch.randn(2, 1, 24, 2, 8)
    o *= torch.linspace(0.05, 1.0, 24)[:, None, None]
    leaf = pa.UnitRows(detach=detach, eps=1.0)
    with small_tiles():
        found = result_and_gradient(leaf, o, d_y, Triton.name)
    expected = result_and_gradient(leaf, o.double(), d_y.double(), "reference")
    assert 0.2 < (o.norm(dim=-1) > 1).double().mean() < 0.8
    for result, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_rows_whose_squares_overflow_or_vanish(size):
    torch.manual_seed(0)
    with small_tiles():
        y = pa.UnitRows(eps=0)(size * torch.randn(1, 4, 2, 8), backend=Triton.name)
    torch.testing.assert_close(y.norm(dim=-1), torch.ones(1, 4, 2))


def test_rows_in_half_precision_are_rounded_once():
    torch.manual_seed(0)
    o = torch.randn(1, 4, 2, 48).half()
    with small_tiles():
        half, single = (pa.UnitRows()(x, backend=Triton.name) for x in (o, o.float()))
    torch.testing.assert_close(half, single.half(), rtol=0, atol=0)


def test_the_widest_rows_are_supported():
    o = torch.randn(1, 1, 1, unit_rows.WIDEST)
    assert pa.UnitRows()(o, backend=Triton.name).norm() == pytest.approx(1)


def test_the_gradient_has_no_row_after_the_last():
    o, d_y = torch.randn(2, 1, 3, 1, 4)
    whole = torch.full((4, 4), 7.0)
    unit_rows.unit_rows_vjp[(1,)](
        o, d_y, whole[:3], 3, 3, 1, 4, 1e-6, *o.stride(), *d_y.stride(),
        DETACH=True, ROWS=4, WIDTH=4,
    )  # fmt: skip
    assert (whole[3] == 7).all()
    assert (whole[:3] != 7).any()
