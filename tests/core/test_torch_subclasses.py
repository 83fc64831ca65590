"""PyTorch's operators find a piece by its name; a class without a name of its own keeps its own
mathematics."""

from dataclasses import dataclass

import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
from precondattn.algebra import group, names
from precondattn.runner import LeafRunner


@dataclass(frozen=True)
class Twice(pa.Softmax):
    """2 softmax, under softmax's name: it is not registered."""

    def forward(self, x, frame):
        out, residuals = super().forward(x, frame)
        return 2 * out, residuals

    def backward(self, x, frame, out, residuals, cotangent):
        return super().backward(x, frame, out / 2, residuals, 2 * cotangent)


class AnyClass(pa.Backend):
    """A backend that runs any leaf by its own methods, as operators."""

    name = "any_class"
    preference = 1000

    def prepare(self, piece, request):
        is_leaf = len(piece.program.calls) == 1 and request.verb != "extend"
        return LeafRunner(piece, piece) if is_leaf else "runs one leaf of a full call"


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(3, 1, 5, 2, 4).unbind(0)


def is_twice(function, x):
    """Whether output and gradient are twice those of softmax."""
    q, k, v = (a.clone().requires_grad_() for a in x)
    out, plain = function(q, k, v), pa.Softmax()(q, k, v)
    torch.testing.assert_close(out, 2 * plain)
    result, expected = (torch.autograd.grad(o.sum(), [q, k, v]) for o in (out, 2 * plain))
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b)
    return True


def test_a_compiled_subclass_computes_its_own_mathematics(x):
    torch.compiler.reset()
    assert is_twice(torch.compile(Twice(), fullgraph=True, backend="aot_eager"), x)
    # Inside a preconditioner, and after its parent with the same text.
    around = pa.Temperature(Twice(), per="head")
    tau = torch.ones(2)
    assert is_twice(torch.compile(lambda *x: around(*x, tau=tau), backend="aot_eager"), x)


def test_a_subclass_computes_its_own_mathematics_in_an_operator(x):
    pa.register_backend(AnyClass())
    try:
        assert "any_class" in Twice().explain(*x).backends
        assert is_twice(Twice(), x)
    finally:
        pa.unregister_backend("any_class")


def test_a_name_is_the_text_where_that_parses_back():
    assert names.name_of(pa.Lucid(pa.Laser())) == "lucid(laser)"
    assert names.name_of(Twice()) != names.name_of(pa.Softmax()) == "softmax"
    assert group.piece_named(names.name_of(Twice())) == Twice()
    assert pa.Lucid(Twice()).program != pa.Lucid().program
    with pytest.raises(ValueError, match="give the class a `name`"):
        group.piece_named("softmax #7")  # As in a graph of another process.


def test_pieces_of_the_package_are_not_kept_by_name():
    kept = dict(names.named_pieces)
    for n in range(1, 20):
        m = pa.Lucid(pa.Laser(pa.Softmax(scale=0.1 * n)))
        assert group.piece_named(names.name_of(m)) == m
    assert names.named_pieces == kept


def test_a_class_defined_again_gets_another_name():
    def define():
        @dataclass(frozen=True)
        class Scaled(pa.Softmax):
            name = "scaled_in_a_notebook"

        return Scaled()

    try:
        first, second = define(), define()
    finally:
        pa.unregister_mechanism("scaled_in_a_notebook")
    assert names.name_of(first) == "scaled_in_a_notebook" != names.name_of(second)
    assert group.piece_named(names.name_of(first)) == first
    assert group.piece_named(names.name_of(second)) == second
