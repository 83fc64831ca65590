"""Runs a mechanism as one call, as a fused kernel does: all its leaves in turn.

forward     every intermediate result of the program; they are the residuals
backward    in reverse; the gradients of what several leaves arrays_read are summed
step        every leaf's step; if leaves share a buffer, the first updates it
"""

from __future__ import annotations

from collections.abc import Mapping

from precondattn.arrays import Array, Arrays, namespace
from precondattn.cache import Update
from precondattn.frame import Frame
from precondattn.reversed_order import reversed_keys
from precondattn_conformance.faults.fault import BACKWARD, FORWARD, STEP, MethodCall, MethodResult


def whole(call: MethodCall) -> MethodResult:
    """Run a method of a group of leaves."""
    if call.stage == FORWARD:
        return _forward(call)
    if call.stage == BACKWARD:
        return _backward(call)
    return _step(call) if call.stage == STEP else _step_backward(call)


def arrays_read(call: MethodCall, number: int) -> dict[str, str]:
    """The array of the program that each input of a leaf reads, by the leaf's name of the input."""
    declared = dict(call.mechanism.program.calls[number].arguments)
    return declared | {formal: v for (i, formal), v in call.wiring.items() if i == number}


def _inputs(call: MethodCall, number: int, arrays: Mapping[str, Array]) -> Arrays:
    return {formal: arrays[name] for formal, name in arrays_read(call, number).items()}


def _frame(call: MethodCall, number: int) -> Frame:
    program = call.mechanism.program
    is_reversed = not program.calls[number].reads.isdisjoint(program.reversed_values)
    return reversed_keys(call.frame) if is_reversed else call.frame


def _forward(call: MethodCall) -> MethodResult:
    arrays = dict(call.inputs)
    calls = call.mechanism.program.calls
    for i, leaf_call in enumerate(calls):
        inputs = _inputs(call, i, arrays)
        arrays[leaf_call.out] = leaf_call.leaf.forward(inputs, _frame(call, i))[0]
    out = call.mechanism.program.out
    return MethodResult(arrays[out], tuple(arrays[c.out] for c in calls if c.out != out))


def _backward(call: MethodCall) -> MethodResult:
    program = call.mechanism.program
    intermediate = [c.out for c in program.calls if c.out != program.out]
    arrays = {
        **call.inputs,
        **dict(zip(intermediate, call.residuals, strict=True)),
        program.out: call.out,
    }
    cotangents = {program.out: call.cotangent}
    for i, leaf_call in reversed([*enumerate(program.calls)]):
        if leaf_call.out not in cotangents:
            continue
        gradients = leaf_call.leaf.backward(
            _inputs(call, i, arrays),
            _frame(call, i),
            arrays[leaf_call.out],
            (),
            cotangents[leaf_call.out],
        )
        for formal, name in arrays_read(call, i).items():
            accumulate(cotangents, name, gradients[formal])
    return MethodResult(gradients=_of_inputs(call, cotangents))


def accumulate(cotangents: Arrays, name: str, gradient: Array) -> None:
    """Add a gradient to the gradient of an array of the program."""
    cotangents[name] = cotangents[name] + gradient if name in cotangents else gradient


def _of_inputs(call: MethodCall, cotangents: Arrays) -> Arrays:
    return {
        name: cotangents[name] if name in cotangents else namespace(array).zeros_like(array)
        for name, array in call.inputs.items()
    }


def _steps(call: MethodCall) -> tuple[Arrays, dict[str, Update]]:
    """Every array of the program after a step, and the buffer updates."""
    arrays = dict(call.inputs)
    updates: dict[str, Update] = {}
    for i, leaf_call in enumerate(call.mechanism.program.calls):
        keys = leaf_call.slot_keys()
        past = {slot: call.past[key] for slot, key in keys.items()}
        inputs = _inputs(call, i, arrays)
        arrays[leaf_call.out], of_leaf = leaf_call.leaf.step(past, inputs, call.frame)
        updates = {keys[slot]: update for slot, update in of_leaf.items()} | updates
    return arrays, updates


def _step(call: MethodCall) -> MethodResult:
    arrays, updates = _steps(call)
    return MethodResult(arrays[call.mechanism.program.out], updates=updates)


def _step_backward(call: MethodCall) -> MethodResult:
    program = call.mechanism.program
    arrays, _ = _steps(call)
    cotangents, d_past = {program.out: call.cotangent}, Arrays()
    for i, leaf_call in reversed([*enumerate(program.calls)]):
        keys = leaf_call.slot_keys()
        before = {key for other in program.calls[:i] for key in other.slot_keys().values()}
        zero = namespace(call.cotangent).zeros_like
        out = arrays[leaf_call.out]
        d_buffers = {
            slot: zero(call.past[key]) if key in before else call.d_buffers[key]
            for slot, key in keys.items()
        }
        gradients, d_slots = leaf_call.leaf.step_backward(
            {slot: call.past[key] for slot, key in keys.items()},
            _inputs(call, i, arrays),
            call.frame,
            cotangents[leaf_call.out] if leaf_call.out in cotangents else zero(out),
            d_buffers,
        )
        for formal, name in arrays_read(call, i).items():
            accumulate(cotangents, name, gradients[formal])
        for slot, d_buffer in d_slots.items():
            accumulate(d_past, keys[slot], d_buffer)
    return MethodResult(gradients=_of_inputs(call, cotangents), d_past=d_past)
