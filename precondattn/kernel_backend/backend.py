"""The base class of backends that have a class with kernels for each leaf or group."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import ClassVar

from precondattn.algebra.piece import Piece
from precondattn.arrays import ByName, Tree
from precondattn.backend import Backend, MethodsOf, Request, Support
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
"""The method that serves each verb."""


class KernelBackend(Backend):
    """Subclass it with a `table`, and `refuses_request` for what no kernel supports.

    A class in the table has `refuses`, and those methods of a backend that it supports.
    """

    table: ClassVar[KernelTable] = {}
    """The class that computes each leaf or group. Leaves that are not in it are declined."""
    has_ledger: ClassVar[bool] = False
    """Whether its kernels are chosen by default only where the ledger of its package has them."""

    def kernels(self, mechanism: Piece) -> Kernels:
        """An object that computes a leaf or group; None where the backend has none."""
        kernel_class = kernels_in(self.table, mechanism)
        return None if kernel_class is None else kernel_class()

    def refuses_request(self, request: Request) -> str | None:
        """The reason why no kernel supports a request: its device, its dtype; None otherwise."""
        return None

    def refuses_kernels(self, kernels: Kernels, request: Request) -> str | None:
        """The reason why these kernels do not support a request, whatever the mechanism."""
        return None

    def on_device(self) -> str:
        """The end of a refusal where the table depends on the device, such as " on a TPU"."""
        return ""

    def refusal(self, mechanism: Piece, request: Request) -> str | None:
        """The reason why the backend does not support a request; None where it does."""
        if (reason := self.refuses_request(request)) is not None:
            return reason
        kernels = self.kernels(mechanism)
        reason = None if kernels is None else self.refuses_kernels(kernels, request)
        return self.refusal_of_kernels(mechanism, request) if reason is None else reason

    def refusal_of_kernels(self, mechanism: Piece, request: Request) -> str | None:
        """The reason why the kernels do not support a request, whatever device is here; or None."""
        if (kernels := self.kernels(mechanism)) is None:
            lack = lack_in(self.table, mechanism)
            return f"has no kernels for {mechanism}{self.on_device()}{lack}"
        if not hasattr(kernels, VERBS[request.verb]):
            return f"has no {VERBS[request.verb]} of {mechanism}"
        refusal: str | None = kernels.refuses(mechanism, request)
        return refusal

    def capability(self) -> str:
        """The compute capability of this GPU, such as "9.0"; empty where there is none."""
        return ""

    def assembler(self) -> str:
        """What makes machine code of the kernels here, with its version: "ptxas 13.1"."""
        return ""

    def ledger_entry(self, mechanism: Piece, request: Request) -> LedgerEntry:
        """What the ledger must have for these kernels to be chosen by default."""
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
        """A step that a framework may differentiate has its gradient from a kernel too."""
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
    """The methods of an object with kernels, each where `launching` says."""

    def __init__(self, backend: KernelBackend, piece: Piece, kernels: Kernels) -> None:
        super().__init__(backend, piece, methods=kernels)
        self.algorithm = type(kernels).__name__
        self.residual_shapes = lambda inputs, frame: kernels.residual_shapes(piece, inputs)

        def launched(method: Callable[..., Tree], at: int) -> Callable[..., Tree]:
            def launch(*arrays: Tree) -> Tree:
                with backend.launching(arrays[at]):
                    return method(*arrays)

            return launch

        for name in ("forward", "forward_with_residuals", "backward", "step", "step_backward"):
            at = 1 if name.startswith("step") else 0  # The first argument of a step are buffers.
            setattr(self, name, launched(getattr(self, name), at))
