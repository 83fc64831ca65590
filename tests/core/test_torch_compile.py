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
from precondattn_conformance.inputs import PLAIN
from tests.core.inputs import inputs_of

SIZES = [(2, 9), (3, 17), (5, 40), (4, 11)]


tensors_of = partial(inputs_of, library="torch", kind="clustered", requires_grad=True)


def agree(function, plain, x):
    """Raise unless outputs and gradients agree."""
    out, expected = function(**x), plain(**x)
    torch.testing.assert_close(out, expected)
    cotangent, inputs = torch.ones_like(out), list(x.values())
    gradients = [torch.autograd.grad(each, inputs, cotangent) for each in (out, expected)]
    torch.testing.assert_close(*gradients)


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
        x = tensors_of(m, b=b, t=t)
        agree(partial(compiled, **given), partial(m, **given), x)
    assert counted.frame_count == 2


def test_marked_dimensions_take_one_graph(counted):
    m = pa.Lucid()
    compiled = torch.compile(m, fullgraph=True, backend=counted)
    for b, t in SIZES:
        x = tensors_of(m, b=b, t=t)
        for tensor in x.values():
            torch._dynamo.mark_dynamic(tensor, 0)
            torch._dynamo.mark_dynamic(tensor, 1)
        agree(compiled, m, x)
    assert counted.frame_count == 1


@pytest.mark.thorough
@pytest.mark.parametrize("expression", ["lucid", "path", "gated_delta"])
def test_chunks_of_any_length_extend_a_cache_in_two_graphs(expression, counted):
    m = pa.parse(expression)
    x = tensors_of(m, b=3, t=64, requires_grad=False)
    cache = m.init_cache(**x, capacity=64)
    extend = partial(m.extend, donate=True) if expression == "lucid" else m.extend
    compiled = torch.compile(extend, fullgraph=True, backend=counted)
    outs, start = [], 0
    for t in (7, 21, 2, 34):
        tokens = {name: array[:, start : start + t] for name, array in x.items()}
        out, cache = compiled(cache, **tokens)
        outs.append(out)
        start += t
    torch.testing.assert_close(torch.cat(outs, dim=1), m(**x))
    assert counted.frame_count == 2


OUTSIDE = pa.Softmax(window=4)
BUILT = {
    "classes": lambda x: pa.Lucid(pa.Laser(OUTSIDE), eps=0.5)(**x),
    "an expression": lambda x: pa.parse("lucid[eps=0.5](laser)")(**x),
    "a shorthand": lambda x: pa.lucid(**x, eps=0.5, window=3),
}


@pytest.mark.parametrize("built", BUILT.values(), ids=BUILT)
def test_a_mechanism_built_in_the_graph(built, counted):
    x = tensors_of("lucid", b=2, t=6, requires_grad=False)
    compiled = torch.compile(built, fullgraph=True, backend=counted)
    torch.testing.assert_close(compiled(x), built(x))


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_an_exported_program_has_a_dynamic_batch_and_length(tmp_path):
    layer = CompiledLayer(pa.Lucid(pa.Laser()))
    dims = ({0: torch.export.Dim("b"), 1: torch.export.Dim("t")},)
    program = torch.export.export(layer, (torch.randn(2, 9, 8),), dynamic_shapes=dims)
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for b, t in [(3, 70), (2, 1)]:
        x = torch.randn(b, t, 8)
        torch.testing.assert_close(loaded(x), layer(x))
    code = (
        "import torch, precondattn.torch_operators;"
        f"torch.export.load({str(tmp_path / 'layer.pt2')!r}).module()(torch.randn(2, 9, 8))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# PyTorch's own check reads `grad` of what is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("expression", "backend"),
    [("lucid_solve", "torch"), ("softmax", "reference")],
)
def test_opcheck_of_full_calls(expression, backend):
    m = pa.parse(expression)
    x = list(tensors_of(m, t=6).values())
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
    x = tensors_of(m, t=6, requires_grad=False)
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
        *((text, "torch") for text in ("softmax", "lucid(laser)", "gated_delta")),
        ("gated_delta", "reference"),
    ],
)
def test_conformance_checks_dynamic_shapes(expression, backend):
    case = Case("dynamic_shapes", expression, "torch", "float32", PLAIN, "clustered")
    measured = run(case, backend)
    assert measured.error <= measured.bound


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


def test_an_operator_asks_once_for_all_sizes_and_is_an_error_where_it_is_declined():
    for backend in (ForOperators(), ForOperators("is not for graphs")):
        pa.register_backend(backend)
        torch.compiler.reset()
        call = torch.compile(pa.Softmax(), backend="aot_eager", dynamic=True, fullgraph=True)
        given = [(*torch.ones(3, 1, t, 2, 4),) for t in (5, 7, 9)]
        if backend.refusal:
            with pytest.raises(pa.UnsupportedError, match="softmax: for_operators is not for gra"):
                call(*given[0], backend=backend.name)
        else:
            outs = [call(*qkv, backend=backend.name) for qkv in given]
            assert [out.shape[1] for out in outs] == [5, 7, 9]
            assert backend.asked == [("forward", "cpu", "float32")]
        pa.unregister_backend(backend.name)
