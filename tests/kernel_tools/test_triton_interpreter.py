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


def test_a_cast_towards_zero_truncates():
    x = normal(128)
    result = torch.zeros(128, dtype=torch.bfloat16)
    with checked():
        kernels.cast[(1,)](x, result, "rtz", 128)
    cut = (x.view(torch.int32) & ~0xFFFF).view(torch.float32)
    assert torch.equal(result.float(), cut)
    assert not torch.equal(result, x.bfloat16())


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_product_of_16_bits_is_summed_in_32(dtype):
    a = torch.ones(32, 32, dtype=dtype)
    a[:, 0] = 2048  # 2048 + 1 = 2048 in 16 bits.
    result = torch.zeros(32, 32)
    with checked():
        kernels.product[(1,)](a, torch.ones_like(a), result, 32, "ieee")
    assert (result == 2048 + 31).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int32])
def test_atomic_additions_of_lanes_and_programs_add_up(dtype):
    x, y, old = torch.arange(8).to(dtype), torch.zeros(4, dtype=dtype), torch.zeros(24, dtype=dtype)
    with checked():
        kernels.update[(3,)](x, y, old, "add", 8)
    assert y.tolist() == [12, 18, 24, 30]
    assert old[:8].tolist() == [0, 0, 0, 0, 0, 1, 2, 3]
    assert torch.equal(old[20:] + x[4:], y)


def test_other_atomic_operations_are_correct():
    x = torch.tensor([3.0, -1, 5, 2, 4, 0, -2, 9])
    y, old = torch.zeros(8), torch.zeros(8)
    with checked():
        kernels.update[(1,)](x, y, old, "max", 8)
        assert y.tolist() == [4, 0, 5, 9, 0, 0, 0, 0]
        kernels.update[(1,)](x, y, old, "exchange", 8)
    assert old.tolist() == [4, 0, 5, 9, 0, 0, 0, 0]
    assert torch.equal(y, x)
    x, y, old = torch.arange(4), torch.tensor([0, 5, 2, 5]), torch.zeros(4, dtype=torch.int64)
    with checked():
        kernels.update[(1,)](x, y, old, "compare and swap", 4)
    assert (y.tolist(), old.tolist()) == ([1, 5, 3, 5], [0, 5, 2, 5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_lanes_without_other_are_undefined(dtype):
    x, y = torch.arange(1, 9).to(dtype), torch.zeros(1, dtype=dtype)
    with checked():
        kernels.sum_of_first[(1,)](x, y, 5, BLOCK=8, OTHER=True)
        assert y.item() == 15
        kernels.sum_of_first[(1,)](x, y, 5, BLOCK=8, OTHER=False)
    assert y.isnan().all()


def test_infinities_and_nans_raise_no_warning():
    x, out = torch.tensor([*SPECIAL, 0.0]), torch.zeros(16)
    with checked():
        kernels.arithmetic[(1,)](x, x, out, 4)
    assert out[4:8].isnan().all()


def test_autotuning_uses_the_first_configuration():
    x, y = normal(100), torch.zeros(100)
    with checked(seed=0):
        kernels.tuned_scale[lambda meta: (-(-100 // meta["BLOCK"]),)](x, y, 100, 2.0)
    assert torch.equal(y, 2 * x)
    assert kernels.tuned_scale.best_config.kwargs == {"BLOCK": 16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_accesses_within_bounds_pass(dtype):
    x = normal(100).gt(0).to(dtype)
    y = torch.zeros(3, 200, dtype=dtype)
    with checked(seed=0):
        kernels.copy[(2,)](x, y[1, ::2], 100, 0, 2, 64)
        kernels.copy[(2,)](x, y[2, 99:], 100, 0, 1, 64)
    assert not y[0].any()
    assert torch.equal(y[1, ::2], x)
    assert torch.equal(y[2, 99:199], x)
    assert not y[1, 1::2].any()


def test_an_expanded_tensor_has_one_element_in_memory():
    x, y = torch.tensor([3.0]).expand(16), torch.zeros(16)
    with checked():
        kernels.read[(1,)](x, y, 0, 0, 16)
        assert (y == 3).all()
        with pytest.raises(OutOfBoundsError, match="15 of 16 elements are read"):
            kernels.read[(1,)](x, y, 0, 1, 16)


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


def test_a_read_out_of_bounds_is_detected_although_it_is_inside_another_tensor():
    whole = normal(64)
    with checked(), pytest.raises(OutOfBoundsError, match="16 of 16"):
        kernels.read[(1,)](whole[:32], whole[32:], 32, 1, 16)


def test_empty_tensors_and_tuples_of_tensors_are_accepted():
    nothing, x, y = torch.zeros(0), normal(2, 16), torch.zeros(16)
    with checked(seed=0):
        kernels.copy[(1,)](nothing, nothing, 0, 0, 1, 16)
        kernels.first_of_each[(1,)]((x[0], x[1]), y, 16)
        assert torch.equal(y, x[0] + x[1])
        kernels.shifted[(1,)](kernels.Strided(x, 2, 1.5), y, 16)
        assert torch.equal(y, x.flatten()[::2] + 1.5)
        with pytest.raises(OutOfBoundsError, match="16 of 16"):
            kernels.read[(1,)](nothing, y, 0, 1, 16)
        with pytest.raises(OutOfBoundsError, match=r"4 of 16 .* shape .12,"):
            kernels.first_of_each[(1,)]((x[0], x[1, :12]), y, 16)


def running_sum(seed):
    y = torch.zeros(64)
    with checked(seed):
        kernels.running_sum[(8,)](torch.ones(64), y, 64, 8)
    return y


def test_a_planted_race_gives_different_outputs_in_different_orders():
    in_order = torch.arange(1.0, 65)
    assert torch.equal(running_sum(None), in_order)
    outputs = [running_sum(seed) for seed in range(3)]
    assert not any(torch.equal(output, in_order) for output in outputs)
    assert not torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[2], running_sum(2))


def test_a_planted_lost_update_is_detected_in_any_order():
    x, y = torch.ones(64), torch.zeros(1)
    for seed in (None, 0, 1):
        with checked(seed):
            with pytest.raises(RaceError, match=r"program \(\d, 0, 0\) changes 1 of the elements"):
                kernels.total[(4,)](x, y, 16, ATOMIC=False)
            y.zero_()
            kernels.total[(4,)](x, y, 16, ATOMIC=True)
            assert y == 64


def test_every_program_of_a_grid_runs_once_whatever_the_order():
    for seed in (None, 0, 1):
        y = torch.full((24,), -1, dtype=torch.int32)
        with checked(seed):
            kernels.places[(2, 3, 4)](y)
        assert y.tolist() == list(range(24))


def test_after_checked_kernels_run_unchecked_again():
    x, y = normal(64), torch.zeros(16)

    def read_behind():
        kernels.read[(1,)](x[:32], y, 30, 1, 16)

    with checked(seed=3):
        with pytest.raises(OutOfBoundsError), checked(seed=None):
            read_behind()
        with pytest.raises(OutOfBoundsError):
            read_behind()
        inner = torch.zeros(64)
        kernels.running_sum[(8,)](torch.ones(64), inner, 64, 8)
        assert torch.equal(inner, running_sum(3))
    read_behind()
    assert torch.equal(y, x[30:46])
    kernels.running_sum[(8,)](torch.ones(64), inner, 64, 8)
    assert torch.equal(inner, torch.arange(1.0, 65))


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
