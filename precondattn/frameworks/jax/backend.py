"""The base class of backends for JAX.

Its runners are functions of trees of arrays. `run` determines how such a function is called:
compiled, and on each device's part of sharded arrays.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial

from precondattn.algebra.piece import Piece
from precondattn.arrays import Array, ByName, Residuals, Tree
from precondattn.backend import Backend, Request, Runner
from precondattn.cache import Updates
from precondattn.frame import Frame

Output = Callable[[ByName, Frame], Array]

StepOutput = Callable[[ByName, ByName, Frame], tuple[Array, Updates]]


class JaxBackend(Backend):
    """The base class of JAX backends; it comes first: `class Jax(JaxBackend, Portable)`."""

    @abstractmethod
    def run(self, verb: str, runner: JaxRunner, *arrays: Tree) -> Tree:
        """The result of `runner.computing(verb)(*arrays)`."""

    def differentiable(self, mechanism: Piece) -> Output | None:
        """The output as a function that JAX can differentiate any number of times, or None.

        Without it, second derivatives are those of another backend of JAX, or of the definition.
        """
        return None

    def differentiable_step(self, mechanism: Piece) -> StepOutput | None:
        """The step as a function that JAX can differentiate any number of times, or None.

        With it, `step_backward` must be differentiable in the same way.
        """
        return None

    def prepare(self, piece: Piece, request: Request) -> Runner | str:
        answer = super().prepare(piece, request)
        return answer if isinstance(answer, str) else JaxRunner(self, piece, answer)


class JaxRunner(Runner):
    """The runner of a piece by `JaxBackend.run`. Runners of one piece are equal, compiled once."""

    def __init__(self, backend: JaxBackend, piece: Piece, plain: Runner) -> None:
        self.backend, self.piece, self.plain = backend, piece, plain
        self._key, self.algorithm = (backend, piece), plain.algorithm
        for verb in ("forward", "backward", "step", "step_backward"):
            setattr(self, verb, partial(backend.run, verb, self))

    def refuses_by_default(self) -> str | None:
        return self.plain.refuses_by_default()

    def residuals_from_lse(self, lse: Array) -> Residuals | None:
        return self.plain.residuals_from_lse(lse)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JaxRunner) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def computing(self, verb: str) -> Callable[..., Tree]:
        """The method named `verb` of the methods that compute, with its derivatives."""
        from precondattn.frameworks.jax.second_derivative import with_derivatives

        function = getattr(self.plain, verb)
        return lambda *arrays: with_derivatives(verb, self.backend, function, self.piece)(*arrays)
