"""PyTorch's FlopCounterMode counts what the leaves declare."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.flop_counter import FlopCounterMode

import precondattn as pa
from precondattn_conformance.bench.cost import flops
from precondattn_conformance.declared import derived, expressions
from precondattn_conformance.inputs import CallLayout, make_inputs

LAYOUT = CallLayout("test", t=6, s=6)
WHOLE = [e for e in sorted({*expressions()} - derived()) if "[" not in e]


def call_of(expression):
    """The mechanism, its inputs, and its declared FLOPs by work; 0 where they are unknown."""
    m = pa.parse(expression)
    arrays = make_inputs(m, LAYOUT, "clustered")
    sizes = m.inputs.sizes(expression, {name: array.shape for name, array in arrays.items()})
    x = {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items()}
    return m, x, lambda work: flops(m, sizes, work) or 0


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("expression", WHOLE)
def test_counted_flops_are_those_declared(expression, backend):
    m, x, declared = call_of(expression)
    if declared("forward") == 0:
        pytest.skip("its leaves do not all declare FLOPs")
    with FlopCounterMode(display=False) as counter:
        out = m(**x, backend=backend)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == int(declared("forward"))
    assert counter.get_total_flops() == int(declared("forward_backward"))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        m(**x, backend=backend)
    assert counter.get_total_flops() == forward


def test_counting_does_not_change_results():
    m, x, _ = call_of("lucid(laser)")
    expected = torch.autograd.grad(m(**x).sum(), list(x.values()))
    with FlopCounterMode(display=False):
        result = torch.autograd.grad(m(**x).sum(), list(x.values()))
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_step_of_one_token_counts_as_decoding(requires_grad):
    m, x, _ = call_of("linear")
    cache = m.init_cache(**x)
    one = {name: array[:, :1].detach().requires_grad_(requires_grad) for name, array in x.items()}
    with FlopCounterMode(display=False) as counter:
        out, extended = m.extend(cache, **one)
    b, _, h, d = x["q"].shape
    assert counter.get_total_flops() == b * h * 5 * d * x["v"].shape[-1]
    expected, again = m.extend(cache, **one)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(extended, again)


def test_a_step_counts_all_slots_of_a_cache_of_tokens():
    m, x, _ = call_of("softmax")
    x = {name: array.detach() for name, array in x.items()}
    cache = m.init_cache(**x, capacity=8)
    with FlopCounterMode(display=False) as counter:
        out, cache = m.extend(cache, **{name: array[:, :1] for name, array in x.items()})
    b, _, h, d = x["q"].shape
    assert counter.get_total_flops() == b * h * 2 * 9 * (d + x["v"].shape[-1])
    torch.testing.assert_close(out, m(**x)[:, :1])
    assert cache.length.tolist() == [1] * b


def test_a_gradient_in_a_counter_that_the_call_was_not_in_is_counted():
    m, x, declared = call_of("linear")
    out = m(**x)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == int(declared("forward_backward") - declared("forward"))


@pytest.mark.thorough
def test_a_call_does_not_import_the_counter():
    code = (
        "import sys, torch, precondattn as pa; pa.linear(*torch.ones(3, 1, 2, 1, 4));"
        "assert 'torch.utils.flop_counter' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
