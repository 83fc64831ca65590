"""Under PyTorch's autocast a call follows the rules of PyTorch's own fused attention."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def under(dtype=torch.bfloat16, **options):
    return torch.autocast("cpu", dtype, **options)


def tensors_of(expression, dtype=torch.float32, **options):
    made = make_inputs(pa.parse(expression), CallLayout("test", t=6, s=6), "clustered")
    return {name: torch.tensor(array, dtype=dtype, **options) for name, array in made.items()}


def qkv(dtype=torch.float32):
    return torch.randn(3, 1, 5, 2, 4, generator=torch.Generator().manual_seed(0)).to(dtype)


def by_pytorch(q, k, v):
    heads_first = (a.transpose(1, 2) for a in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads_first)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
def test_dtypes_are_those_of_pytorchs_own_attention_and_mixtures_it_refuses_are_refused(target):
    for first in DTYPES:
        for second in DTYPES:
            q, k, v = qkv()
            arrays = q.to(first), k.to(first), v.to(second)
            with under(target):
                try:
                    expected = by_pytorch(*arrays).dtype
                except RuntimeError:
                    with pytest.raises(TypeError, match="one dtype expected"):
                        pa.linear(*arrays)
                    continue
                assert pa.linear(*arrays).dtype == pa.softmax(*arrays).dtype == expected


def test_outside_autocast_and_where_it_is_disabled_mixed_dtypes_raise():
    q, k, v = qkv()
    with pytest.raises(TypeError, match="one dtype expected"):
        pa.lucid(q, k, v.bfloat16())
    with under(), under(enabled=False), pytest.raises(TypeError, match="one dtype expected"):
        pa.lucid(q, k, v.bfloat16())
    with under(), under(enabled=False):
        assert pa.lucid(q, k, v).dtype == torch.float32
    with under():
        assert pa.lucid(*(a.numpy() for a in (q, k, v))).dtype == np.float32


def test_autocast_of_another_device_changes_nothing():
    q, k, v = qkv()
    with pytest.MonkeyPatch.context() as patch:
        # Without a GPU, `torch.autocast("cuda")` turns itself off.
        patch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
        assert pa.lucid(q, k, v).dtype == torch.float32


def test_a_second_derivative_by_the_reference_equals_that_without_autocast():
    q, k, v = (a.requires_grad_() for a in qkv())

    def second(out):
        (first,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
        return torch.autograd.grad(first.square().sum(), k)[0]

    with under():
        found = pa.softmax(q, k, v, backend="reference")
    expected = pa.softmax(*(a.bfloat16() for a in (q, k, v)), backend="reference")
    result, wanted = second(found), second(expected)  # Terms are rounded one by one.
    assert (result - wanted).norm() < 2**-8 * wanted.norm()


@pytest.mark.parametrize(("expression", "where"), [("lucid", "inside"), ("hedgehog", "around")])
def test_a_compiled_call_equals_the_plain_one(expression, where):
    torch.compiler.reset()
    m, x = pa.parse(expression), tensors_of(expression, requires_grad=True)

    def plain(arrays):
        if where == "around":
            return m(**arrays)
        with under():
            return m(**arrays)

    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")

    def out_and_gradients(function):
        with under(enabled=where == "around"):
            out = function(x)
            return out, *torch.autograd.grad(out, list(x.values()), torch.ones_like(out))

    for a, b in zip(out_and_gradients(compiled), out_and_gradients(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


class LinearModule(torch.nn.Module):
    def forward(self, q, k, v):
        return pa.linear(q, k, v)


def test_a_saved_graph_computes_in_float32_under_autocast():
    program = torch.export.export(LinearModule(), tuple(qkv())).module()
    expected = program(*qkv())
    with under():
        torch.testing.assert_close(program(*qkv()), expected, rtol=0, atol=0)


def test_the_pullback_may_be_called_inside_or_outside_autocast():
    q, k, v = qkv()
    with under():
        out, pullback = pa.Linear().vjp(q, k, v.bfloat16())
        inside = pullback(torch.ones_like(out))
    outside = pullback(torch.ones_like(out))
    assert {name: a.dtype for name, a in inside.items()} == {
        "q": torch.float32,
        "k": torch.float32,
        "v": torch.bfloat16,
    }
    for name, gradient in inside.items():
        torch.testing.assert_close(gradient, outside[name], rtol=0, atol=0)
    with under():
        m = pa.Linear()
        _, _, pullback = m.extend_vjp(m.init_cache(q, k, v), q, k, v)
        gradients, states = pullback(torch.ones(1, 5, 2, 4, dtype=torch.bfloat16))
    assert {a.dtype for a in (*gradients.values(), *states.values())} == {torch.float32}


def test_a_cache_has_the_dtype_of_the_autocast_it_was_created_under_and_no_other_is_cast():
    q, k, v = qkv()
    m = pa.Lucid()
    with under():
        cache = m.init_cache(q, k, v, capacity=8)
        out, cache = m.extend(cache, q, k, v)
        out, cache = m.extend(cache, q, k, v.bfloat16(), lengths=[2], donate=True)
        assert m.explain(q, k, v).request.dtype == "bfloat16"
    assert out.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="these inputs need float32"):
        m.extend(cache, q, k, v)
    wide = m.init_cache(q, k, v, capacity=8)
    with under(), pytest.raises(TypeError, match="init_cache under the same autocast"):
        m.extend(wide, q, k, v)


def test_mamba2_brings_its_own_arguments_together():
    x = torch.randn(1, 5, 2, 4).bfloat16().float()
    read, write = torch.randn(2, 1, 5, 1, 3)
    step, decay, skip = torch.rand(1, 5, 2), -torch.rand(2), torch.rand(2)
    with under():
        out = pa.mamba2(x, step, decay, write.bfloat16(), read, D=skip)
    expected = pa.mamba2(x.bfloat16(), step, decay, write.bfloat16(), read.bfloat16(), D=skip)
    torch.testing.assert_close(out, expected)
