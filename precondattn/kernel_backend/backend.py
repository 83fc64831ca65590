"""The base class of backends with one class of kernels for each leaf or group."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import ClassVar

from precondattn.algebra.piece import Piece
from precondattn.arrays import ByName, Tree
from precondattn.backend import Backend, MethodsOf, Request, Support
from precondattn.frame import Frame
from precondattn.kernel_backend.code_hash import code_of
from precondattn.kernel_backend.kernel_table import (
    Kernels,
    KernelTable,
    entry_in,
    kernels_in,
    lack_in,
)
from precondattn.kernel_backend.ledger import (
    TRUST,
    LedgerEntry,
    entries,
    family_of,
    is_trusting,
    width_of,
)
from precondattn.runner import Runner

VERBS = {"forward": "forward", "vjp": "backward", "extend": "step", "extend_vjp": "step_backward"}
"""The method of a kernel class that serves each verb."""


class KernelBackend(Backend):
    """The base class of kernel backends. A subclass defines `table` and `refuses_request`.

    A class in the table has a method `refuses`, and the methods of `Backend` that it supports.
    """

    table: ClassVar[KernelTable] = {}
    """The class that computes each leaf or group. Other leaves are declined."""
    has_ledger: ClassVar[bool] = False
    """Whether a kernel is chosen by default only if the ledger of its package lists it."""

    def kernels(self, mechanism: Piece) -> Kernels:
        """The object that computes a leaf or group; None if the table has none."""
        kernel_class = kernels_in(self.table, mechanism)
        return None if kernel_class is None else kernel_class()

    def refuses_request(self, request: Request) -> str | None:
        """The reason why no kernel supports a request, such as its dtype; None if one may."""
        return None

    def refuses_kernels(self, kernels: Kernels, request: Request) -> str | None:
        """The reason why these kernels do not support a request with any mechanism; or None."""
        return None

    def on_device(self) -> str:
        """The end of a refusal if the table depends on the device, such as " on a TPU"."""
        return ""

    def refusal(self, mechanism: Piece, request: Request) -> str | None:
        """The reason why the backend does not support a request; None if it does."""
        if (reason := self.refuses_request(request)) is not None:
            return reason
        kernels = self.kernels(mechanism)
        reason = None if kernels is None else self.refuses_kernels(kernels, request)
        return self.refusal_of_kernels(mechanism, request) if reason is None else reason

    def refusal_of_kernels(self, mechanism: Piece, request: Request) -> str | None:
        """The reason why the kernels do not support a request on any device; None if they do."""
        if (kernels := self.kernels(mechanism)) is None:
            lack = lack_in(self.table, mechanism)
            return f"has no kernels for {mechanism}{self.on_device()}{lack}"
        if not hasattr(kernels, VERBS[request.verb]):
            return f"has no {VERBS[request.verb]} of {mechanism}"
        refusal: str | None = kernels.refuses(mechanism, request)
        return refusal

    def capability(self) -> str:
        """The compute capability of this machine's GPU, such as "9.0"; empty without a GPU."""
        return ""

    def assembler(self) -> str:
        """The assembler that produces the machine code, with its version, such as "ptxas 13.1"."""
        return ""

    def ledger_entry(self, mechanism: Piece, request: Request) -> LedgerEntry:
        """The ledger entry that these kernels need to be chosen by default."""
        kernel_class = entry_in(self.table, mechanism)
        assert kernel_class is not None
        return LedgerEntry(
            family_of(mechanism, kernel_class),
            request.verb,
            request.dtype,
            width_of(request),
            self.capability(),
            self.assembler(),
            code_of(kernel_class),
        )

    def refuses_by_default(self, mechanism: Piece, request: Request) -> str | None:
        if not self.has_ledger or request.device not in self.accelerates or is_trusting():
            return None
        known = entries(type(self).__module__.partition(".")[0])
        if known and all(
            self.ledger_entry(mechanism, replace(request, verb=verb)) in known
            for verb in self._verbs(mechanism, request)
        ):
            return None
        here = f"compute capability {self.capability()}" if self.capability() else "this device"
        return (
            f"its kernels have not yet run and agreed with the oracle on {here} in "
            f"{request.dtype} at width {width_of(request)}; it runs if it is requested by name "
            f"(backend={self.name!r}), or with {TRUST}=1 in the environment"
        )

    def _verbs(self, mechanism: Piece, request: Request) -> tuple[str, ...]:
        """The verbs that a request needs; differentiable steps also need `extend_vjp`."""
        has_gradient = hasattr(self.kernels(mechanism), VERBS["extend_vjp"])
        if request.verb == "extend" and request.differentiated and has_gradient:
            return "extend", "extend_vjp"
        return (request.verb,)

    def launching(self, inputs: ByName) -> AbstractContextManager[object]:
        """The context in which kernels are launched on these inputs."""
        return nullcontext()

    def supports(self, mechanism: Piece, request: Request) -> Support:
        reason = self.refusal(mechanism, request)
        return Support.yes() if reason is None else Support.no(reason)

    def runner(self, mechanism: Piece, library: str, *, differentiable: bool = False) -> Runner:
        kernels = self.kernels(mechanism)
        if kernels is None:
            raise ValueError(f"{self.name} has no kernels for {mechanism}{self.on_device()}")
        return KernelRunner(self, mechanism, kernels)


class KernelRunner(MethodsOf):
    """A runner that calls the methods of a kernel class in the context of `launching`."""

    def __init__(self, backend: KernelBackend, piece: Piece, kernels: Kernels) -> None:
        super().__init__(backend, piece, methods=kernels)
        self.algorithm, self._kernels, self._launching = (
            type(kernels).__name__,
            kernels,
            backend.launching,
        )
        self.residual_shapes = lambda inputs, frame: kernels.residual_shapes(piece, inputs)
        for name in ("forward", "forward_with_residuals", "backward", "step", "step_backward"):
            # The first argument of a step has the buffers.
            at = 1 if name.startswith("step") else 0
            setattr(self, name, self._launched(getattr(self, name), at))
        if hasattr(kernels, "frame_of_step"):
            self.step, self.step_backward = map(self._in_own_frame, (self.step, self.step_backward))

    def _launched(self, method: Callable[..., Tree], at: int) -> Callable[..., Tree]:
        """The method in the context of `launching`. Argument `at` has the inputs."""

        def launched(*arrays: Tree) -> Tree:
            with self._launching(arrays[at]):
                return method(*arrays)

        return launched

    def _in_own_frame(self, method: Callable[..., Tree]) -> Callable[..., Tree]:
        """A step with the frame that its kernels read."""
        frame_of: Callable[[Frame], Frame] = self._kernels.frame_of_step

        def step(past: ByName, inputs: ByName, frame: Frame, *others: Tree) -> Tree:
            return method(past, inputs, frame_of(frame), *others)

        return step
