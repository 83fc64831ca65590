"""The base class of backends with one class of kernels for each leaf or group."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import ClassVar

from precondattn.algebra.piece import Piece
from precondattn.arrays import ByName, Tree
from precondattn.backend import Backend, Request, Runner
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
from precondattn.method_backend import MethodRunner

VERBS = {"forward": "forward", "vjp": "backward", "extend": "step", "extend_vjp": "step_backward"}


class KernelBackend(Backend):
    """The base class of kernel backends. A subclass defines `table` and `refuses_request`.

    A class in the table has a method `refuses`, and the methods of `Runner` that it supports, with
    the piece as their first argument.
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
        """Why kernels run a piece only if the backend is requested by name; None if they do not."""
        if not self.has_ledger or request.device not in self.accelerates or is_trusting():
            return None
        ledger = entries(type(self).__module__.partition(".")[0])
        verbs = [request.verb]  # Differentiable steps also need `extend_vjp`.
        has_gradient = hasattr(self.kernels(mechanism), VERBS["extend_vjp"])
        if request.verb == "extend" and request.differentiated and has_gradient:
            verbs.append("extend_vjp")
        needed = (self.ledger_entry(mechanism, replace(request, verb=verb)) for verb in verbs)
        if ledger and all(entry in ledger for entry in needed):
            return None
        device = f"compute capability {self.capability()}" if self.capability() else "this device"
        return (
            f"its kernels have not yet run and agreed with the oracle on {device} in "
            f"{request.dtype} at width {width_of(request)}; it runs if it is requested by name "
            f"(backend={self.name!r}), or with {TRUST}=1 in the environment"
        )

    def launching(self, inputs: ByName) -> AbstractContextManager[object]:
        """The context in which kernels are launched on these inputs."""
        return nullcontext()

    def prepare(self, piece: Piece, request: Request) -> Runner | str:
        if (reason := self.refusal(piece, request)) is not None:
            return reason
        # An operator outlives the compiler, and so would the symbolic sizes of its request.
        return KernelRunner(self, piece, None if request.is_operator else request)


class KernelRunner(MethodRunner):
    """A runner that calls the methods of a kernel class in the context of `launching`."""

    def __init__(
        self, backend: KernelBackend, piece: Piece, request: Request | None = None
    ) -> None:
        kernels = backend.kernels(piece)
        self.backend, self.piece, self.request = backend, piece, request
        self.frame_of_step = getattr(kernels, "frame_of_step", None)
        super().__init__(kernels, piece)
        self.algorithm = type(kernels).__name__

    def refuses_by_default(self) -> str | None:
        request = self.request
        return None if request is None else self.backend.refuses_by_default(self.piece, request)

    def called(self, name: str, method: Callable[..., Tree]) -> Callable[..., Tree]:
        launching, frame_of = self.backend.launching, self.frame_of_step
        if name.startswith("residual"):
            return lambda *arguments: method(arguments[0])  # Kernels need no frame for shapes.

        def full(inputs: ByName, *others: Tree) -> Tree:
            with launching(inputs):
                return method(inputs, *others)

        def step(past: ByName, inputs: ByName, frame: Frame, *others: Tree) -> Tree:
            frame = frame if frame_of is None else frame_of(frame)
            with launching(inputs):
                return method(past, inputs, frame, *others)

        return step if name.startswith("step") else full
