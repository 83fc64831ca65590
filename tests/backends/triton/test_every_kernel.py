"""What holds for the kernels of every mechanism: NaN, strides, and orders of programs."""

import pytest

pytest.importorskip("triton")

import torch

from tests.backends.triton.calls import KernelCall, scaled, strided

ALL = "window=13,bias=true,softcap=2"
OPTIONS = f"softmax[{ALL},sink=true,distance=slopes]"
LASER = f"laser(softmax[{ALL},distance=slopes])"
FAR = scaled(v=100)


@pytest.mark.parametrize(
    ("expression", "spread"),
    [
        ("softmax[softcap=2]", 1),
        ("laser", 1),
        ("laser", 100),
        ("path", 1),
    ],
)
def test_a_nan_in_a_key_reaches_its_own_output_and_later_ones(expression, spread):
    call = KernelCall(expression, 20, change=scaled(v=spread))
    x, d_out = call.arrays()
    x["k"][:, 7, 0, 3] = torch.nan
    out = call.run(x, d_out)[0]
    assert torch.isnan(out[:, 7:]).all()
    assert torch.isfinite(out[:, :7]).all()


@pytest.mark.thorough(but=("conditioned_query",))
@pytest.mark.parametrize(
    "call",
    [
        KernelCall(OPTIONS, 33, b=2, h=2, shared="b"),
        KernelCall(LASER, 20, b=2, h=2, shared="h"),
        KernelCall("laser", 18, h=2, n=2, change=FAR),
        KernelCall("path", 34, h=2),
        KernelCall("lucid_solve[beta=true]", 40, n=2),
        KernelCall("lucid_solve", 40, b=2, n=2, dtype="bfloat16"),
        KernelCall("lucid_solve[metric=transported,beta=true]", 40, b=2, n=2),
        KernelCall("gated_delta", 19, b=2, u=2),
        KernelCall("kda", 19, b=2),
        KernelCall("conditioned_query", 19, h=2),
    ],
    ids=lambda call: call.expression if call.dtype == "float32" else call.dtype,
)
def test_strides_and_the_order_of_programs_change_no_bit(call):
    """The cotangent has one row for all tokens."""
    x, d_out = call.arrays()
    d_out = d_out[:, :1].expand_as(d_out)
    out, gradients, _ = call.run(x, d_out.contiguous(), seed=1)
    apart = {name: strided(array) for name, array in x.items()}
    again, found, _ = call.run(apart, d_out, seed=2)
    assert torch.equal(again, out)
    assert all(torch.equal(found[name], gradients[name]) for name in x)
