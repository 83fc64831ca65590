"""The base class of backends for JAX.

Its runners are functions of trees of arrays. `run` determines how such a function is called:
compiled, and on each device's part of sharded arrays.
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
"""A function from inputs and frame to the output."""

StepOutput = Callable[[ByName, ByName, Frame], tuple[Array, Updates]]
"""A function from old buffers, new inputs and frame to the output and the updates of a step."""


class JaxBackend(Backend):
    """The base class of JAX backends; it comes first: `class Jax(JaxBackend, Portable)`."""

    @abstractmethod
    def run(self, verb: str, runner: JaxRunner, *arrays: Tree) -> Tree:
        """The result of `runner.computing(verb)(*arrays)`."""

    def differentiable(self, mechanism: Piece) -> Output | None:
        """The output as a function that JAX can differentiate any number of times.

        None if the backend has none. Second derivatives are then those of another backend of JAX,
        or of the definition, whose memory may be quadratic in the number of tokens.
        """
        return None

    def differentiable_step(self, mechanism: Piece) -> StepOutput | None:
        """The step as a function that JAX can differentiate any number of times, or None.

        If it is given, `step_backward` must be differentiable in the same way. If it is None,
        `step` and `step_backward` have the derivatives of the step of another backend of JAX, or of
        the definition.
        """
        return None

    def runner(self, mechanism: Piece, library: str, *, differentiable: bool = False) -> Runner:
        return JaxRunner(self, mechanism, super().runner(mechanism, library))


class JaxRunner:
    """The runner of a piece by `JaxBackend.run`. Runners of one piece are equal, compiled once."""

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
        """The method named `verb` of the methods that compute, with its derivatives."""
        from precondattn.frameworks.jax.second_derivative import with_derivatives

        function = getattr(self.plain, verb)
        return lambda *arrays: with_derivatives(verb, self.backend, function, self.piece)(*arrays)
