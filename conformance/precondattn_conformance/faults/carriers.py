"""The backends in which a fault is planted; everything else in them is right.

==========  ==============================================================================
leaves      the reference's leaves, one at a time
whole       the reference's leaves, all of a composition as one call (`whole.py`)
blocks      the blocked algorithms of `precondattn_portable`, with blocks of a few tokens,
            so that short sequences have several blocks and a shorter last one
autograd    the leaves, differentiated by the framework's automatic differentiation
==========  ==============================================================================
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import precondattn as pa
from precondattn.algebra.piece import Piece
from precondattn.arrays import Array, Arrays, dtype_name, library_of, upcast, upcast_all
from precondattn.backend import Request, Runner
from precondattn.cache import Update
from precondattn.frame import Frame
from precondattn.method_backend import MethodRunner
from precondattn.runner import LeafRunner
from precondattn_conformance.faults.blocks import small_blocks
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    STEP_BACKWARD,
    Fault,
    MethodCall,
    MethodResult,
)
from precondattn_conformance.faults.whole import whole
from precondattn_portable import Portable


class Carrier(pa.Backend):
    """A backend in which a fault is planted, and which is right otherwise."""

    only_by_name = True
    wide_values = True
    masks_pairs = True
    differentiable = False
    fault: Fault | None = None
    reached = 0
    """The number of calls in which the fault was planted."""
    broken = ""
    """The traceback of a planted call that raised an error, which is not the intended fault."""

    def prepare(self, piece: Piece, request: Request) -> Runner | str:
        reason = self.refusal(piece, request)
        return reason or MethodRunner(self, piece, differentiable=self.differentiable)

    def refusal(self, piece: Piece, request: Request) -> str | None:
        """The reason why the carrier does not run a piece; None if it does."""
        raise NotImplementedError

    def carry(self, fault: Fault | None) -> None:
        """Plant this fault from now on; None plants no fault."""
        self.fault, self.reached, self.broken = fault, 0, ""

    def truth(self, call: MethodCall) -> MethodResult:
        """The correct result of a method."""
        raise NotImplementedError

    def _run(self, call: MethodCall) -> MethodResult:
        if self.fault is None or not self.fault.concerns(call):
            return self.truth(call)
        self.reached += 1
        try:
            return self.fault.change(self.truth, call)
        except Exception:
            self.broken = traceback.format_exc(limit=-3)
            raise

    def _called(
        self,
        stage: str,
        mechanism: Piece,
        inputs: Mapping[str, Array],
        frame: Frame,
        past: Mapping[str, Array] | None = None,
        d_buffers: Mapping[str, Array] | None = None,
        **results: Any,
    ) -> MethodResult:
        """Run a method on wide arrays, with the buffers by their names in a `MethodCall`."""
        names = _names_in_call(mechanism)
        for field, buffers in (("past", past), ("d_buffers", d_buffers)):
            if buffers is not None:
                results[field] = {name: upcast(buffers[key]) for key, name in names.items()}
        if past is not None:
            slots = mechanism.program.slots
            results["slots"] = {names[key]: slot for key, (slot, _) in slots.items()}
        results["dtype"] = dtype_name(next(iter(inputs.values())))
        return self._run(MethodCall(stage, mechanism, upcast_all(inputs), frame, **results))

    def forward(
        self, mechanism: Piece, inputs: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, tuple[Array, ...]]:
        result = self._called(FORWARD, mechanism, inputs, frame)
        return result.out, result.residuals

    def backward(
        self,
        mechanism: Piece,
        inputs: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: tuple[Array, ...],
        cotangent: Array,
    ) -> Arrays:
        results = {"out": upcast(out), "residuals": residuals, "cotangent": upcast(cotangent)}
        return self._called(BACKWARD, mechanism, inputs, frame, **results).gradients

    def step(
        self,
        mechanism: Piece,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
    ) -> tuple[Array, dict[str, Update]]:
        result = self._called(STEP, mechanism, inputs, frame, past)
        names = _names_in_call(mechanism)
        return result.out, {key: result.updates[name] for key, name in names.items()}

    def step_backward(
        self,
        mechanism: Piece,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
        cotangent: Array,
        d_buffers: Mapping[str, Array],
    ) -> tuple[Arrays, Arrays]:
        result = self._called(
            STEP_BACKWARD, mechanism, inputs, frame, past, d_buffers, cotangent=upcast(cotangent)
        )
        names = _names_in_call(mechanism)
        return result.gradients, {key: result.d_past[name] for key, name in names.items()}


def _names_in_call(mechanism: Piece) -> dict[str, str]:
    """The name of each buffer in a `MethodCall`, by its key: a leaf's slot or a group's key."""
    if len(mechanism.program.calls) > 1:
        return {key: key for key in mechanism.program.slots}
    return {key: slot for slot, key in mechanism.program.slot_keys[0].items()}


class Leaves(Carrier):
    """A carrier with the reference's leaves."""

    name = "faulty-leaves"

    def refusal(self, piece: Piece, request: Request) -> str | None:
        return "runs one leaf at a time" if len(piece.program.calls) > 1 else None

    def truth(self, call: MethodCall) -> MethodResult:
        return _result(LeafRunner(call.mechanism, call.mechanism), call)


class Autograd(Leaves):
    """A carrier whose leaves are differentiated by the framework."""

    name = "faulty-autograd"
    differentiable = True


class WholeCarrier(Carrier):
    """A carrier that runs a composition as one call."""

    name = "faulty-whole"

    def refusal(self, piece: Piece, request: Request) -> str | None:
        return "runs compositions only" if len(piece.program.calls) == 1 else None

    def truth(self, call: MethodCall) -> MethodResult:
        return whole(call)


class BlockedCarrier(Carrier):
    """A carrier with the blocked algorithms and small blocks."""

    name = "faulty-blocks"
    libraries = Portable.libraries

    def __init__(self) -> None:
        self.portable = Portable()

    def refusal(self, piece: Piece, request: Request) -> str | None:
        return self.portable.refusal(piece, request)

    def truth(self, call: MethodCall) -> MethodResult:
        library = library_of(next(iter(call.inputs.values())))
        runner = self.portable.runner(call.mechanism, library or "", "cpu")
        with small_blocks():
            return _result(runner, call)

    def _run(self, call: MethodCall) -> MethodResult:
        with small_blocks():  # A fault's change may also read the block sizes.
            return super()._run(call)


def _result(runner: LeafRunner, call: MethodCall) -> MethodResult:
    """The result of a runner's method, with the buffers' names as in the call."""
    run, x, frame = runner.methods, call.inputs, call.frame
    if call.stage == FORWARD:
        return MethodResult(*run.forward(x, frame))
    if call.stage == BACKWARD:
        gradients = run.backward(x, frame, call.out, call.residuals, call.cotangent)
        return MethodResult(gradients=gradients)
    if call.stage == STEP:
        out, updates = run.step(call.past, x, frame)
        return MethodResult(out, updates=updates)
    of_step = (call.past, x, frame, call.cotangent, call.d_buffers)
    gradients, d_past = run.step_backward(*of_step)
    return MethodResult(gradients=gradients, d_past=d_past)


CARRIERS: dict[str, type[Carrier]] = {
    "leaves": Leaves,
    "whole": WholeCarrier,
    "blocks": BlockedCarrier,
    "autograd": Autograd,
}


@contextmanager
def registered() -> Iterator[dict[str, Carrier]]:
    """The carriers by their short names, registered as backends in this context."""
    carriers = {name: cls() for name, cls in CARRIERS.items()}
    for carrier in carriers.values():
        pa.register_backend(carrier)
    try:
        yield carriers
    finally:
        for carrier in carriers.values():
            pa.unregister_backend(carrier.name)


def helped(carrier: Carrier) -> tuple[str, ...]:
    """The backends to request: the carrier, and the reference for what it does not support."""
    return (carrier.name, "reference") if isinstance(carrier, BlockedCarrier) else (carrier.name,)
