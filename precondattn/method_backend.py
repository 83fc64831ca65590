"""Adapters for classes whose methods get the piece as their first argument.

    supports(piece, request)       Support.yes(), Support.yes(differentiable=True) or Support.no(…)
    forward(piece, inputs, frame)  and the other methods of `Runner`, as far as they are supported
    runner(piece, library, *, differentiable)   in their place: an object with the methods of a
                                                `Runner`
    refuses_by_default(piece, request)          as that of `Runner`

`register_backend` and the discovery of entry points apply the adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from precondattn.arrays import Tree
from precondattn.backend import Backend, Request, Runner, Support
from precondattn.by_autograd import DifferentiableRunner

if TYPE_CHECKING:
    from precondattn.algebra.piece import Piece

Methods = Any
METHODS = (*(n for n in vars(Runner) if n[0] != "_" and callable(getattr(Runner, n))),)


class MethodRunner(Runner):
    """A runner that calls an object's methods, whose first argument is the piece if it is given."""

    def __init__(self, methods: Methods, *piece: Piece, differentiable: bool = False) -> None:
        self.name = getattr(methods, "name", type(methods).__name__)
        self.algorithm = getattr(methods, "algorithm", "")
        self.differentiable = differentiable
        defined = {name: getattr(methods, name) for name in METHODS if hasattr(methods, name)}
        if "forward" in defined:
            defined.setdefault("forward_with_residuals", defined["forward"])
        for name, method in defined.items():
            setattr(self, name, self.called(name, partial(method, *piece)))
        if differentiable:
            self.by_autograd = DifferentiableRunner.by_autograd.difference(defined)
            for name in self.by_autograd:
                setattr(self, name, partial(getattr(DifferentiableRunner, name), self))

    def called(self, name: str, method: Callable[..., Tree]) -> Callable[..., Tree]:
        """The function to call in place of a method; a subclass may change it."""
        return method


class MethodBackend(Backend):
    """A backend that asks `supports`, and whose runners call the other methods."""

    def __init__(self, methods: Methods) -> None:
        self.methods = methods
        self.name = methods.name

    def prepare(self, piece: Piece, request: Request) -> Runner | str:
        methods = self.methods
        # A plan has asked for the call of which an operator is a part.
        support = Support.yes() if request.is_operator else methods.supports(piece, request)
        if not support.ok:
            reason: str = support.reason
            return reason
        differentiable = support.differentiable
        if hasattr(methods, "runner"):
            made = methods.runner(piece, request.library, differentiable=differentiable)
            runner = MethodRunner(made, differentiable=made.differentiable)
        else:
            runner = MethodRunner(methods, piece, differentiable=differentiable)
        if hasattr(methods, "refuses_by_default") and not request.is_operator:
            refuses = partial(methods.refuses_by_default, piece, request)
            setattr(runner, "refuses_by_default", refuses)  # noqa: B010  mypy: a method.
        return runner

    def describing(self, device: str) -> AbstractContextManager[object]:
        describing = getattr(self.methods, "describing", super().describing)
        context: AbstractContextManager[object] = describing(device)
        return context


def _declared(name: str) -> property:
    """The value that the class declares, or the default of `Backend`."""
    return property(lambda self: getattr(self.methods, name, getattr(Backend, name)))


DECLARED = tuple(name for name in Backend.__annotations__ if name != "name")

for _name in DECLARED:
    setattr(MethodBackend, _name, _declared(_name))
