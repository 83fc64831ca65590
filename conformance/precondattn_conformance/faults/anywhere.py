"""Faults that apply to any mechanism: wrong or missing results, and wrong use of memory.

Computing in a wider dtype than the call's is not a fault, because the core casts the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np

from precondattn.algebra.piece import Piece
from precondattn.arrays import Array, namespace
from precondattn_conformance.faults.applicable import Named, looks_at_other_tokens
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    STEP_BACKWARD,
    Change,
    MethodCall,
    MethodResult,
    Truth,
    to_bfloat16,
    with_call,
    with_result,
)
from precondattn_conformance.faults.states import slots_of


def _through_float32(x: Array) -> Array:
    return x.astype(np.float32).astype(x.dtype)


def _one_wrong(x: Array) -> Array:
    """x with its last element off by a thousandth of the largest."""
    x = x.copy()
    x[(-1,) * x.ndim] += 1e-3 * max(float(np.max(np.abs(x))), 1.0)
    return x


def _one_nan(x: Array) -> Array:
    x = x.copy()
    x[(-1,) * x.ndim] = np.nan
    return x


_calls = count()


def _with_noise(x: Array) -> Array:
    """x with noise that differs in every call."""
    noise = np.random.default_rng(next(_calls)).normal(size=x.shape)
    return (x + 1e-4 * noise).astype(x.dtype)


def _of_first_sequence(x: Array) -> Array:
    return namespace(x).broadcast_to(x[:1], x.shape) + 0


INVALID: tuple[tuple[str, Callable[[Array], Array]], ...] = (
    ("rounded to bfloat16", to_bfloat16),
    ("one element a thousandth off", _one_wrong),
    ("that of the first sequence for all sequences", _of_first_sequence),
    ("with noise", _with_noise),
    ("rounded to float32 in a float64 call", _through_float32),
    ("one element NaN", _one_nan),
    ("that of the next sequence", lambda x: namespace(x).roll(x, 1, axis=0)),
    ("with the heads reversed", lambda x: namespace(x).flip(x, axis=2)),
)


def result(m: Piece, stage: str) -> Named:
    """A wrong output, or a wrong gradient of the first input."""
    for name, change in INVALID:
        yield name, with_result(partial(_changed, change))


def _changed(change: Callable[[Array], Array], correct: MethodResult) -> MethodResult:
    if correct.out is not None:
        return replace(correct, out=change(correct.out))
    name = next(iter(correct.gradients))
    gradients = {**correct.gradients, name: change(correct.gradients[name])}
    return replace(correct, gradients=gradients)


def gradient(m: Piece, stage: str) -> Named:
    """For each input, a fault that sets its gradient to 0; none is 0 otherwise."""
    if stage in (BACKWARD, STEP_BACKWARD):
        for name in m.inputs:
            yield f"of {name} left out", with_result(partial(_without, name))


def _without(name: str, result: MethodResult) -> MethodResult:
    return replace(result, gradients={**result.gradients, name: 0 * result.gradients[name]})


def zero_times(m: Piece, stage: str) -> Named:
    """0 times terms that should be left out, which changes nothing on finite inputs.

    The terms are those of the other sequences in the batch and, in softmax, of later keys.
    """
    if stage not in (FORWARD, BACKWARD) or "v" not in m.inputs or not looks_at_other_tokens(m):
        return
    is_masked = all(getattr(leaf, "hides_later_keys", False) for leaf in m.program.leaves)
    if stage == FORWARD and m.offers.causal and is_masked:
        yield "the keys of all tokens", partial(_plus_zero, "k", _of_a_sequence)
    yield "the values of all sequences", partial(_plus_zero, "v", _of_all)


def _plus_zero(
    name: str, total: Callable[[Array, Array], Array], truth: Truth, call: MethodCall
) -> MethodResult:
    result = truth(call)
    if call.stage == FORWARD:
        return replace(result, out=result.out + 0 * total(call.inputs[name], result.out))
    gradients = {n: g + 0 * total(call.inputs[name], g) for n, g in result.gradients.items()}
    return replace(result, gradients=gradients)


def _of_a_sequence(x: Array, like: Array) -> Array:
    total = namespace(x).sum(x, axis=tuple(range(1, x.ndim)))
    return namespace(x).reshape(total, (-1,) + (1,) * (like.ndim - 1))


def _of_all(x: Array, like: Array) -> Array:
    return namespace(x).sum(x)


def memory(m: Piece, stage: str) -> Named:
    """Writes to the caller's memory, ignored strides, and results that share memory."""
    name = next(iter(m.inputs))
    yield f"the input {name} written to", partial(_written, lambda call: call.inputs[name])
    if stage in (BACKWARD, STEP_BACKWARD):
        yield "the cotangent written to", partial(_written, lambda call: call.cotangent)
        yield "the strides of the cotangent ignored", with_call(_of_dense_cotangent)
    if stage in (STEP, STEP_BACKWARD):
        for slot in list(slots_of(m))[-1:]:
            yield f"the buffer {slot} written to", partial(_written, partial(_buffer, slot))
    if stage in (FORWARD, BACKWARD):
        yield "the memory of a result reused", _reused()
    if stage in (FORWARD, STEP):  # Not every gradient reads this input.
        yield f"the strides of {name} ignored", with_call(partial(_dense_input, name))
    if stage == FORWARD:
        yield "a result cached by the identity of the inputs", _cached_by_identity()


def _buffer(name: str, call: MethodCall) -> Array:
    return call.past[name]


def _written(which: Callable[[MethodCall], Array], truth: Truth, call: MethodCall) -> MethodResult:
    result = _copied(truth(call))
    which(call)[...] *= 0.5
    return result


def _copied(result: MethodResult) -> MethodResult:
    """A copy of a result, which shares no memory with it."""
    return MethodResult(
        None if result.out is None else np.array(result.out),
        tuple(map(np.array, result.residuals)),
        {name: type(update)(*map(np.array, update)) for name, update in result.updates.items()},
        {name: np.array(d) for name, d in result.gradients.items()},
        {name: np.array(d) for name, d in result.d_past.items()},
    )


def _reused() -> Change:
    """A call writes its result over that of the previous call of the same shape."""
    buffers: dict[tuple[int, ...], Array] = {}

    def planted(truth: Truth, call: MethodCall) -> MethodResult:
        result = truth(call)
        name = next(iter(result.gradients), None)
        array = result.out if name is None else result.gradients[name]
        buffer = buffers.setdefault((*array.shape, array.dtype.itemsize), array.copy())
        buffer[...] = array
        if name is None:
            return replace(result, out=buffer)
        return replace(result, gradients={**result.gradients, name: buffer})

    return planted


def _dense(x: Array) -> Array:
    """The elements in the order in which they are stored in memory."""
    return x if x.flags.c_contiguous else np.ravel(x, order="K").reshape(x.shape)


def _dense_input(name: str, call: MethodCall) -> MethodCall:
    return call.with_inputs(**{name: _dense(call.inputs[name])})


def _of_dense_cotangent(call: MethodCall) -> MethodCall:
    return replace(call, cotangent=_dense(call.cotangent))


def _cached_by_identity() -> Change:
    """Return the last result if the input arrays are the same objects, whatever they contain."""
    last: list[tuple[list[Array], MethodResult]] = []

    def planted(truth: Truth, call: MethodCall) -> MethodResult:
        arrays = [*call.inputs.values()]
        if not last or any(a is not b for a, b in zip(last[0][0], arrays, strict=True)):
            last[:] = [(arrays, truth(call))]
        return last[0][1]

    return planted
