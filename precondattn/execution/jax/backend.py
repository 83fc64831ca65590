"""The base class of backends for JAX, whose runners are functions of trees of arrays.

`run` says how such a function is called: compiled, and on every device's own part of the arrays.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial

from precondattn.algebra.piece import Piece
from precondattn.arrays import Array, ByName, Tree
from precondattn.backend import Backend
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn.runner import Runner

Output = Callable[[ByName, Frame], Array]
"""The output of a mechanism, of its inputs and the frame."""

StepOutput = Callable[[ByName, ByName, Frame], tuple[Array, Updates]]
"""The output and the updates of a step, of the old buffers, the new inputs and the frame."""


class JaxBackend(Backend):
    """Subclass it before the class that computes: `class Jax(JaxBackend, Portable)`."""

    @abstractmethod
    def run(self, verb: str, runner: JaxRunner, *arrays: Tree) -> Tree:
        """The result of `runner.computing(verb)(*arrays)`."""

    def differentiable(self, mechanism: Piece) -> Output | None:
        """The output, in operations that JAX can differentiate any number of times.

        None where the backend has none: derivatives of its gradient are then those of another
        backend of JAX, or of the definition, whose memory may be quadratic.
        """
        return None

    def differentiable_step(self, mechanism: Piece) -> StepOutput | None:
        """Its step, where that consists of operations that JAX can differentiate any number of
        times; `step_backward` has to consist of such operations then too.

        Otherwise None: `step` and `step_backward` get the derivatives of the step of another
        backend of JAX, or of the definition.
        """
        return None

    def runner(self, mechanism: Piece, library: str, *, differentiable: bool = False) -> Runner:
        return JaxRunner(self, mechanism, super().runner(mechanism, library))


class JaxRunner:
    """Runs a piece as a backend's `run` does. Runners of one piece are equal, and compiled once."""

    differentiable = False

    def __init__(self, backend: JaxBackend, piece: Piece, plain: Runner) -> None:
        self.backend, self.piece, self.plain = backend, piece, plain
        self._key, self.algorithm = (backend, piece), plain.algorithm
        verbs = ("forward", "backward", "step", "step_backward")
        methods = [partial(backend.run, verb, self) for verb in verbs]
        self.forward, self.backward, self.step, self.step_backward = methods
        self.forward_with_residuals = self.forward
        self.residuals_from_lse = plain.residuals_from_lse
        self.residual_shapes = plain.residual_shapes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JaxRunner) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def computing(self, verb: str) -> Callable[..., Tree]:
        """The method of that name of what computes, with its derivatives."""
        from precondattn.execution.jax.second_derivative import with_derivatives

        function = getattr(self.plain, verb)
        return lambda *arrays: with_derivatives(verb, self.backend, function, self.piece)(*arrays)
