"""Checks of Triton kernels without a GPU detect planted faults, and correct kernels pass.

`conftest.py` switches the interpreter on for this process.
"""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from precondattn_kernel_tools.triton_interpreter import (
    OutOfBoundsError,
    RaceError,
    checked,
    is_interpreting,
)
from tests.kernel_tools.triton_examples import kernels

pytestmark = pytest.mark.skipif(not is_interpreting(), reason="kernels run on a GPU")


SPECIAL = [float("inf"), -float("inf"), float("nan")]


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_bfloat16_arithmetic_equals_pytorchs():
    x, y = normal(64, dtype=torch.bfloat16), normal(64, dtype=torch.bfloat16, seed=1)
    out = torch.zeros(4, 64, dtype=torch.bfloat16)
    with checked():
        kernels.arithmetic[(1,)](x, y, out, 64)
    expected = [x * y, x / y, torch.maximum(x, y) - x.abs(), x.where(x > y, 1.5)]
    assert torch.equal(out, torch.stack(expected))


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_casts_round_to_the_nearest_and_ties_to_even(to):
    step = torch.finfo(to).eps
    ties = 1 + step * (torch.arange(32) + 0.5)
    x = torch.cat([ties, -ties, normal(57), torch.tensor([0.0, -0.0, 1e30, 1e-30, *SPECIAL])])
    result = torch.zeros(128, dtype=to)
    with checked():
        kernels.cast[(1,)](x, result, None, 128)
    assert torch.equal(result.isnan(), x.isnan())
    assert torch.equal(result.nan_to_num(7), x.to(to).nan_to_num(7))


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "ieee"])
def test_only_a_tf32_product_rounds_its_factors_to_ten_bits(precision):
    a, b = normal(32, 32), normal(32, 32, seed=1)
    result = torch.zeros(32, 32)
    with checked():
        kernels.product[(1,)](a, b, result, 32, precision)
    exact = a.double() @ b.double()
    cut = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32).double() for x in (a, b)]
    expected = cut[0] @ cut[1] if precision == "tf32" else exact
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    assert ((result - exact).abs().max() > 1e-3) == (precision == "tf32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_lanes_without_other_are_undefined(dtype):
    x, y = torch.arange(1, 9).to(dtype), torch.zeros(1, dtype=dtype)
    with checked():
        kernels.sum_of_first[(1,)](x, y, 5, BLOCK=8, OTHER=True)
        assert y.item() == 15
        kernels.sum_of_first[(1,)](x, y, 5, BLOCK=8, OTHER=False)
    assert y.isnan().all()


@pytest.mark.parametrize(
    ("first", "offsets"), [(30, "32 to 45"), (-3, "-3 to -1"), (1000, "1000 to")]
)
def test_a_planted_read_out_of_bounds_is_reported(first, offsets):
    count = {30: 14, -3: 3, 1000: 16}[first]
    says = (
        f"{count} of 16 elements are read outside of a tensor of shape .32,. .* offsets {offsets}"
    )
    with checked(), pytest.raises(OutOfBoundsError, match=says):
        kernels.read[(1,)](normal(32), torch.zeros(16), first, 1, 16)


@pytest.mark.parametrize(("is_atomic", "verb"), [(False, "written"), (True, "updated")])
def test_a_planted_write_out_of_bounds_is_reported_and_not_executed(is_atomic, verb):
    whole = torch.zeros(64)
    with checked(), pytest.raises(OutOfBoundsError, match=f"8 of 24 elements are {verb}"):
        kernels.copy[(1,)](torch.ones(24), whole[20:36], 24, 0, 1, 32, ATOMIC=is_atomic)
    assert not whole.any()


def test_a_mask_that_is_too_wide_is_detected_although_the_storage_is_larger():
    x, y = normal(64), torch.zeros(64)
    with checked():
        kernels.scale[(2,)](x[:40], y[:40], 40, 2.0, 32)
        assert torch.equal(y[:40], 2 * x[:40])
        with pytest.raises(OutOfBoundsError, match=r"10 of 18 .* offsets 40 to 49"):
            kernels.scale[(2,)](x[:40], y[:40], 50, 2.0, 32)
    assert not y[40:].any()


def test_tuples_of_tensors_are_checked_each():
    x, y = normal(2, 16), torch.zeros(16)
    with checked(seed=0):
        kernels.first_of_each[(1,)]((x[0], x[1]), y, 16)
        assert torch.equal(y, x[0] + x[1])
        kernels.shifted[(1,)](kernels.Strided(x, 2, 1.5), y, 16)
        assert torch.equal(y, x.flatten()[::2] + 1.5)
        with pytest.raises(OutOfBoundsError, match="16 of 16"):
            kernels.read[(1,)](torch.zeros(0), y, 0, 1, 16)
        with pytest.raises(OutOfBoundsError, match=r"4 of 16 .* shape .12,"):
            kernels.first_of_each[(1,)]((x[0], x[1, :12]), y, 16)


def test_a_planted_lost_update_is_detected_in_any_order():
    x, y = torch.ones(64), torch.zeros(1)
    for seed in (None, 0, 1):
        with checked(seed):
            with pytest.raises(RaceError, match=r"program \(\d, 0, 0\) changes 1 of the elements"):
                kernels.total[(4,)](x, y, 16, ATOMIC=False)
            y.zero_()
            kernels.total[(4,)](x, y, 16, ATOMIC=True)
            assert y == 64


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("", "TRITON_INTERPRET=1 has to be in the environment before Triton is imported"),
        ("import sys; sys.modules['ml_dtypes'] = None", "pip install 'precondattn[kernels]'"),
    ],
)
def test_checked_names_what_is_missing(before, says):
    program = f"{before}\nfrom precondattn_kernel_tools.triton_interpreter import checked"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nwith checked(): pass"], env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode
    assert says in done.stderr
