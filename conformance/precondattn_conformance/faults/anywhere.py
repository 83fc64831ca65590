"""What can go wrong with any result and any memory, whatever the mechanism.

A wider dtype than the call's is no fault: a caller gets what it asked for, since the core casts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np

import precondattn as pa
from precondattn.arrays import Array, namespace
from precondattn_conformance.faults.applicable import Named
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    STEP_BACKWARD,
    Call,
    Change,
    Result,
    Truth,
    given_back,
    handed,
)
from precondattn_conformance.faults.rounding import to_bfloat16
from precondattn_conformance.faults.states import slots_of


def _through_float32(x: Array) -> Array:
    return x.astype(np.float32).astype(x.dtype)


def _one_wrong(x: Array) -> Array:
    """The last element, off by a thousandth of the largest."""
    x = x.copy()
    x[(-1,) * x.ndim] += 1e-3 * max(float(np.max(np.abs(x))), 1.0)
    return x


def _one_nan(x: Array) -> Array:
    x = x.copy()
    x[(-1,) * x.ndim] = np.nan
    return x


_calls = count()


def _with_noise(x: Array) -> Array:
    """Never the same twice."""
    noise = np.random.default_rng(next(_calls)).normal(size=x.shape)
    return (x + 1e-4 * noise).astype(x.dtype)


def _of_first_sequence(x: Array) -> Array:
    return namespace(x).broadcast_to(x[:1], x.shape) + 0


SPOILED: tuple[tuple[str, Callable[[Array], Array]], ...] = (
    ("rounded to bfloat16", to_bfloat16),
    ("one element a thousandth off", _one_wrong),
    ("that of the first sequence for all", _of_first_sequence),
    ("with noise", _with_noise),
    ("rounded to float32 in a float64 call", _through_float32),
    ("zero", lambda x: 0 * x),
    ("one element NaN", _one_nan),
    ("that of the next sequence", lambda x: namespace(x).roll(x, 1, axis=0)),
    ("as of the heads reversed", lambda x: namespace(x).flip(x, axis=2)),
    ("2 % too large", lambda x: 1.02 * x),
)


def result(m: pa.Mechanism, stage: str) -> Named:
    """The output, or in a gradient that of the first input."""
    for name, change in SPOILED:
        yield name, given_back(partial(_spoiled, change))


def _spoiled(change: Callable[[Array], Array], found: Result) -> Result:
    if found.out is not None:
        return replace(found, out=change(found.out))
    first = next(iter(found.gradients))
    return replace(found, gradients={**found.gradients, first: change(found.gradients[first])})


def memory(m: pa.Mechanism, stage: str) -> Named:
    """Memory of the caller's that is written to, and memory that is given back twice."""
    name = next(iter(m.inputs))
    yield f"the input {name} written to", partial(_written, lambda call: call.inputs[name])
    if stage in (BACKWARD, STEP_BACKWARD):
        yield "the cotangent written to", partial(_written, lambda call: call.cotangent)
        yield "the strides of the cotangent ignored", handed(_of_dense_cotangent)
    if stage == BACKWARD:
        yield "the output written to", partial(_written, lambda call: call.out)
    if stage in (STEP, STEP_BACKWARD):
        for slot in list(slots_of(m))[-1:]:
            yield f"the buffer {slot} written to", partial(_written, partial(_buffer, slot))
    if stage in (FORWARD, BACKWARD):
        yield "that of a result used again", _used_again()
    if stage in (FORWARD, STEP):  # Not every gradient reads it.
        yield f"the strides of {name} ignored", handed(partial(_dense_input, name))
    if stage == FORWARD:
        yield "a result kept for the arrays that it was made of", _kept_by_identity()


def _buffer(name: str, call: Call) -> Array:
    return call.past[name]


def _written(which: Callable[[Call], Array], truth: Truth, call: Call) -> Result:
    result = _copied(truth(call))
    which(call)[...] *= 0.5
    return result


def _copied(result: Result) -> Result:
    """What does not share its memory with anything."""
    return Result(
        None if result.out is None else np.array(result.out),
        tuple(map(np.array, result.residuals)),
        {name: type(made)(*map(np.array, made)) for name, made in result.updates.items()},
        {name: np.array(d) for name, d in result.gradients.items()},
        {name: np.array(d) for name, d in result.d_past.items()},
    )


def _used_again() -> Change:
    """The next call of the same shape writes its result over that of this one."""
    rooms: dict[tuple[int, ...], Array] = {}

    def planted(truth: Truth, call: Call) -> Result:
        result = truth(call)
        name = next(iter(result.gradients), None)
        made = result.out if name is None else result.gradients[name]
        room = rooms.setdefault((*made.shape, made.dtype.itemsize), made.copy())
        room[...] = made
        if name is None:
            return replace(result, out=room)
        return replace(result, gradients={**result.gradients, name: room})

    return planted


def _dense(x: Array) -> Array:
    """The elements in the order in which they stand in memory."""
    return x if x.flags.c_contiguous else np.ravel(x, order="K").reshape(x.shape)


def _dense_input(name: str, call: Call) -> Call:
    return call.given(**{name: _dense(call.inputs[name])})


def _of_dense_cotangent(call: Call) -> Call:
    return replace(call, cotangent=_dense(call.cotangent))


def _kept_by_identity() -> Change:
    """The last result, as long as the arrays are the same ones, whatever stands in them now."""
    last: list[tuple[list[Array], Result]] = []

    def planted(truth: Truth, call: Call) -> Result:
        arrays = [*call.inputs.values()]
        if not last or any(a is not b for a, b in zip(last[0][0], arrays, strict=True)):
            last[:] = [(arrays, truth(call))]
        return last[0][1]

    return planted


def anywhere(m: pa.Mechanism, stage: str) -> Named:
    """What can be wrong with any result, and with any memory."""
    yield from result(m, stage)
    yield from memory(m, stage)
