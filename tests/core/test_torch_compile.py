"""PyTorch's compiler: lengths and batches that vary, mechanisms built in the graph, and export."""

import subprocess
import sys
from functools import partial

import pytest

pytest.importorskip("torch")

import torch
from torch._dynamo.testing import CompileCounterWithBackend

import precondattn as pa
from precondattn.algebra.names import name_of
from precondattn.frame import full_frame
from precondattn.frameworks.torch.autograd import operators
from precondattn.runner import LeafRunner
from precondattn_conformance.case import Case
from precondattn_conformance.checks import run
from precondattn_conformance.disagreement import DisagreementError
from precondattn_conformance.grid import PLAIN
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_torch.backend import Torch

SIZES = [(2, 9), (3, 17), (5, 40), (4, 11)]


def tensors_of(m, b, t, *, requires_grad=True):
    made = make_inputs(m, CallLayout("test", b=b, t=t, s=t), "clustered")
    return {name: torch.tensor(a, requires_grad=requires_grad) for name, a in made.items()}


def agree(function, plain, x):
    """Raise unless outputs and gradients agree."""
    out, expected = function(**x), plain(**x)
    torch.testing.assert_close(out, expected)
    cotangent, inputs = torch.ones_like(out), list(x.values())
    result = torch.autograd.grad(out, inputs, cotangent)
    for a, b in zip(result, torch.autograd.grad(expected, inputs, cotangent), strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture
def counted():
    torch.compiler.reset()
    return CompileCounterWithBackend("aot_eager")


@pytest.mark.thorough
@pytest.mark.parametrize("masks", [("lengths", "key_mask"), ("segment_ids",)])
def test_masks_take_two_graphs(masks, counted):
    m = pa.Lucid()
    compiled = torch.compile(m, fullgraph=True, backend=counted)
    for b, t in SIZES:
        made = {
            "lengths": torch.arange(b) + t - b,
            "key_mask": torch.arange(t).expand(b, t) % 3 != 1,
            "segment_ids": (torch.arange(t).expand(b, t) > t // 2).int(),
        }
        given = {name: made[name] for name in masks}
        x = tensors_of(m, b, t)
        agree(partial(compiled, **given), partial(m, **given), x)
    assert counted.frame_count == 2


def test_marked_dimensions_take_one_graph(counted):
    m = pa.Lucid()
    compiled = torch.compile(m, fullgraph=True, backend=counted)
    for b, t in SIZES:
        x = tensors_of(m, b, t)
        for tensor in x.values():
            torch._dynamo.mark_dynamic(tensor, 0)
            torch._dynamo.mark_dynamic(tensor, 1)
        agree(compiled, m, x)
    assert counted.frame_count == 1


@pytest.mark.thorough
def test_dynamic_true_with_inductor(counted):
    compiled = torch.compile(pa.Lucid(), fullgraph=True, dynamic=True)
    for b, t in SIZES[:3]:
        agree(compiled, pa.Lucid(), tensors_of(pa.Lucid(), b, t))


@pytest.mark.thorough
@pytest.mark.parametrize("expression", ["lucid", "path", "gated_delta"])
def test_chunks_of_any_length_extend_a_cache_in_two_graphs(expression, counted):
    m = pa.parse(expression)
    x = tensors_of(m, 3, 64, requires_grad=False)
    cache = m.init_cache(**x, capacity=64)
    compiled = torch.compile(m.extend, fullgraph=True, backend=counted)
    outs, start = [], 0
    for t in (7, 21, 2, 34):
        tokens = {name: array[:, start : start + t] for name, array in x.items()}
        out, cache = compiled(cache, **tokens)
        outs.append(out)
        start += t
    torch.testing.assert_close(torch.cat(outs, dim=1), m(**x))
    assert counted.frame_count == 2


OUTSIDE = pa.Laser()
BUILT = {
    "a class": lambda x: pa.Lucid(OUTSIDE, eps=0.5)(**x),
    "nested classes": lambda x: pa.Lucid(pa.Laser(pa.Softmax(window=4)))(**x),
    "an expression": lambda x: pa.parse("lucid[eps=0.5](laser)")(**x),
    "a shorthand": lambda x: pa.lucid(**x, eps=0.5, window=3),
}


@pytest.mark.parametrize("built", BUILT.values(), ids=BUILT)
def test_a_mechanism_built_in_the_graph(built, counted):
    x = tensors_of(pa.Lucid(), 2, 6, requires_grad=False)
    compiled = torch.compile(built, fullgraph=True, backend=counted)
    torch.testing.assert_close(compiled(x), built(x))


def test_mamba2_in_the_graph(counted):
    def call(x, dt, a, b, c):
        return pa.mamba2(x, dt, a, b, c, D=a, dt_bias=a, dt_softplus=True)

    compiled = torch.compile(call, fullgraph=True, backend=counted)
    for t in (6, 9, 12):
        given = torch.rand(2, t, 4, 8), torch.rand(2, t, 4), -torch.rand(4)
        arrays = (*given, torch.rand(2, t, 2, 4), torch.rand(2, t, 2, 4))
        torch.testing.assert_close(compiled(*arrays), call(*arrays))
    assert counted.frame_count == 2


class CompiledLayer(torch.nn.Module):
    def __init__(self, m):
        super().__init__()
        self.m, self.project = m, torch.nn.Linear(8, 24)

    def forward(self, x):
        b, t, _ = x.shape
        return self.m(*self.project(x).view(b, t, 3, 2, 4).unbind(2))


def test_an_exported_program_has_a_dynamic_batch_and_length(tmp_path):
    layer = CompiledLayer(pa.Lucid(pa.Laser()))
    dims = ({0: torch.export.Dim("b"), 1: torch.export.Dim("t")},)
    program = torch.export.export(layer, (torch.randn(2, 9, 8),), dynamic_shapes=dims)
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for b, t in [(1, 4), (3, 70), (5, 33), (2, 1)]:
        x = torch.randn(b, t, 8)
        torch.testing.assert_close(loaded(x), layer(x))


@pytest.mark.thorough
def test_an_exported_program_loads_in_another_process(tmp_path):
    program = torch.export.export(CompiledLayer(pa.Lucid()), (torch.randn(2, 9, 8),))
    torch.export.save(program, tmp_path / "layer.pt2")
    code = (
        "import torch, precondattn.torch_operators;"
        f"torch.export.load({str(tmp_path / 'layer.pt2')!r}).module()(torch.randn(2, 9, 8))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# PyTorch's own check reads `grad` of what is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("expression", "backend"),
    [("lucid_solve", "torch"), ("softmax", "torch"), ("linear", "torch"), ("softmax", "reference")],
)
def test_opcheck_of_full_calls(expression, backend):
    m = pa.parse(expression)
    x = list(tensors_of(m, 2, 6).values())
    frame = list(full_frame(6, 6, x[0], lengths=torch.tensor([4, 6])).arrays)
    name = name_of(m)
    torch.library.opcheck(operators.forward, (name, backend, x, frame))
    torch.library.opcheck(operators.inference, (name, backend, [a.detach() for a in x], frame))
    outputs = [a.detach() for a in operators.forward(name, backend, x, frame)]
    cotangent = torch.ones_like(outputs[0])
    arguments = (name, backend, [a.detach() for a in x], frame, outputs, cotangent)
    torch.library.opcheck(operators.backward, arguments)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_opcheck_of_steps():
    m = pa.Linear()
    x = tensors_of(m, 2, 6, requires_grad=False)
    _, cache = m.extend(m.init_cache(**x), **x)
    frame = list(full_frame(6, 6, x["q"]).arrays)
    past, tensors = list(cache.store.values()), list(x.values())
    count = torch.full_like(cache.length, 6)
    arguments = ("linear", "torch", past, tensors, frame)
    torch.library.opcheck(operators.extension, (*arguments, cache.length, count))
    grown = [a.clone().requires_grad_() for a in tensors]
    torch.library.opcheck(operators.step, ("linear", "torch", past, grown, frame))
    cotangents = [torch.ones_like(a) for a in operators.step(*arguments)]
    torch.library.opcheck(operators.step_backward, (*arguments, cotangents))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("expression", "backend"),
    [
        *((text, "torch") for text in ("softmax", "lucid", "lucid(laser)", "gated_delta")),
        *((text, "reference") for text in ("lucid(laser)", "gated_delta")),
    ],
)
def test_conformance_checks_dynamic_shapes(expression, backend):
    case = Case("dynamic_shapes", expression, "torch", "float32", PLAIN, "clustered")
    measured = run(case, backend)
    assert measured.error <= measured.bound


def test_conformance_finds_a_plan_that_compares_a_length(monkeypatch):
    prepare = Torch.prepare

    def comparing(self, piece, request):
        _ = bool(dict(request.shapes)["v"][1] > 10)  # Read, and without effect.
        return prepare(self, piece, request)

    monkeypatch.setattr(Torch, "prepare", comparing)
    case = Case("dynamic_shapes", "linear", "torch", "float32", PLAIN, "clustered")
    with pytest.raises(DisagreementError, match="took 3 graphs"):
        run(case, "torch")


class ForOperators(pa.Backend):
    """Leaves by their definitions, which keeps what it is asked about operators."""

    name = "for_operators"

    def __init__(self, refusal=None):
        self.asked, self.refusal = [], refusal

    def prepare(self, piece, request):
        if not request.is_operator:
            return LeafRunner(piece, piece)
        self.asked.append((request.verb, request.device, request.dtype))
        return self.refusal or LeafRunner(piece, piece)


def compiled_for_any_length(backend):
    pa.register_backend(backend)
    torch.compiler.reset()
    call = torch.compile(pa.Softmax(), backend="aot_eager", dynamic=True, fullgraph=True)
    return lambda t: call(*torch.ones(3, 1, t, 2, 4), backend=backend.name)


def test_an_operator_asks_once_for_all_sizes(only_the_reference):
    backend = ForOperators()
    call = compiled_for_any_length(backend)
    assert [call(t).shape[1] for t in (5, 7, 9)] == [5, 7, 9]
    assert backend.asked == [("forward", "cpu", "float32")]


def test_an_operator_that_is_declined_is_an_error_with_the_reason(only_the_reference):
    call = compiled_for_any_length(ForOperators("is not for graphs"))
    with pytest.raises(pa.UnsupportedError, match="softmax: for_operators is not for graphs"):
        call(5)
