"""Running a plan: the output, the gradients in reverse order, and the extension of a cache.

The dtypes of intermediate results and of their cotangents are described in `cotangents.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import cast as cast_type

import numpy as np

from precondattn.algebra.call import Keeping
from precondattn.algebra.piece import ExtendPullback
from precondattn.arrays import F, cast, fresh, namespace, wants_gradient, zero_where_not
from precondattn.cache import KEY_MASK, Append, Cache, Replace, Updates, updated
from precondattn.cache.kinds import STATE, holding
from precondattn.cache.known_lengths import remembered
from precondattn.dispatch.discovery import REFERENCE
from precondattn.dispatch.empty import EMPTY
from precondattn.dispatch.plan import PlannedCall
from precondattn.execution.arguments import BoundCall
from precondattn.execution.containment import NAN
from precondattn.execution.cotangents import gradients_at, step_gradients_at
from precondattn.execution.masks import nan_where_invalid
from precondattn.execution.parts import Parts
from precondattn.frame import Frame
from precondattn.frameworks.types import Array, Arrays, ByName, Residuals, Tree
from precondattn.reversed_order import reversed_keys
from precondattn.runner import LeafRunner

Traced = tuple[PlannedCall, Arrays, Array, Residuals]
Step = tuple[PlannedCall, Arrays, Arrays, Array]
BridgeOfStep = Callable[..., tuple[Array, Updates]]


def _tolerant(function: F) -> F:
    """A function of a call, for which two floating-point errors of NumPy are none.

    Weights of masked and of decayed tokens are meant to underflow to 0, and OpenBLAS may report an
    invalid operation for finite numbers (numpy issues 13173 and 24067).
    """
    tolerant = np.errstate(under="ignore", invalid="ignore")(function)

    @wraps(function)
    def run(call: BoundCall, /, *args: Tree, **named: Tree) -> Tree:
        is_tolerant = call.prepared.framework.ignores_errors
        return (tolerant if is_tolerant else function)(call, *args, **named)

    return cast_type("F", run)


@_tolerant
def forward(call: BoundCall) -> Array:
    """The output, which the arrays' own framework can differentiate."""
    values, plan, is_direct = dict(call.inputs), call.prepared.plan, call.prepared.is_direct
    for planned in plan.calls:
        inputs = call.inputs if planned.is_whole else _inputs(planned, values, call)
        frame = reversed_keys(call.frame) if planned.is_reversed else call.frame
        has_none = is_direct or planned.backend is EMPTY
        bridge = None if has_none else call.prepared.framework.bridge(planned, call)
        if bridge is None:
            values[planned.out] = planned.runner.forward(inputs, frame)[0]
        else:
            values[planned.out] = bridge(planned, inputs, frame)
    return finished(values[plan.out], call)


@_tolerant
def vjp(call: BoundCall) -> tuple[Array, Callable[[Array], Arrays]]:
    """The output, and the pullback from its cotangent to the gradients by input name."""
    values, plan, is_direct = dict(call.inputs), call.prepared.plan, call.prepared.is_direct
    trace: list[Traced] = []
    for planned in plan.calls:
        inputs, frame = _inputs(planned, values, call), _frame(planned, call)
        operators = (
            None if is_direct else _mapped_operators(call, planned, "backward", *inputs.values())
        )
        if operators is None:
            out, residuals = planned.runner.forward(inputs, frame)
        else:
            out, residuals = operators.with_residuals(planned, inputs, frame)
        values[planned.out] = out
        # A private copy would hide that a backend writes to it.
        trace.append((planned, inputs, call.prepared.framework.read_only(out), residuals))

    out = finished(values[plan.out], call)
    # The caller may write to the returned output, which the pullback reads.
    out = fresh(out) if out is values[plan.out] else out
    return out, partial(_pulled_back, call, trace)


@_tolerant
def _pulled_back(call: BoundCall, trace: list[Traced], cotangent: Array) -> Arrays:
    cotangents: Arrays = {call.prepared.plan.out: finished(cotangent, call, is_cotangent=True)}
    for planned, inputs, out, residuals in reversed(trace):
        if planned.out not in cotangents:
            continue
        d_out, frame = cotangents[planned.out], _frame(planned, call)
        operators = _mapped_operators(call, planned, "backward", d_out, out)
        if operators is None:
            gradients = gradients_at(d_out, planned.runner, inputs, frame, out, residuals)
        else:
            gradients = operators.gradients(planned, inputs, frame, out, residuals, d_out)
        for name, value in planned.arguments:
            _accumulate(cotangents, value, gradients[name])
    return _input_gradients(cotangents, call, cotangent)


def gradients_from_lse(call: BoundCall, out: Array, lse: Array, cotangent: Array) -> Arrays | None:
    """The gradients of softmax attention, given its output and log-sum-exp."""
    (planned,) = call.prepared.plan.calls
    residuals = planned.runner.residuals_from_lse(lse)
    if residuals is None:
        return None
    traced = planned, _inputs(planned, call.inputs, call), out, residuals
    return _pulled_back(call, [traced], cotangent)


def _steps(
    call: BoundCall,
    cache: Cache,
    bridge_of: Callable[..., BridgeOfStep | None],
    parts: Parts | None = None,
) -> tuple[Array, Updates, list[Step]]:
    """The output, the update of every buffer, and the steps; `parts` keeps the states between."""
    values, plan, frame = dict(call.inputs), call.prepared.plan, call.frame
    updates: Updates = {}
    trace: list[Step] = []
    for planned in plan.calls:
        inputs = call.inputs if planned.is_whole else _inputs(planned, values, call)
        past = {name: cache.store[key] for name, key in planned.buffers}
        slots = planned.piece.program.slots.values()
        if parts is not None and any(slot.kind.rows == STATE for slot, _ in slots):
            values[planned.out], step_updates = _stepped_between(parts, planned, past, inputs, call)
            for name, key in planned.owned:
                updates[key] = step_updates[name]
            continue
        bridge = None
        if not call.prepared.is_direct:
            bridge = bridge_of(planned, *past.values(), *inputs.values())
        step = planned.runner.step if bridge is None else partial(bridge, planned)
        values[planned.out], step_updates = step(past, inputs, frame)
        for name, key in planned.owned:
            updates[key] = step_updates[name]
        trace.append((planned, past, inputs, values[planned.out]))
    return values[plan.out], updates, trace


def _stepped_between(
    parts: Parts, planned: PlannedCall, past: Arrays, inputs: Arrays, call: BoundCall
) -> tuple[Array, Updates]:
    """A step for each part, or one for all parts if its runner returns the states between."""
    found = None
    if not parts.is_ragged and isinstance(planned.runner, LeafRunner):
        arrays = (*past.values(), *inputs.values())
        is_plain = call.prepared.is_direct or not _bridge_of_step(
            call, parts.length, planned, *arrays
        )
        if is_plain and not wants_gradient(*arrays):
            found = planned.runner.states_between(past, inputs, call.frame, parts.columns)
    if found is not None:
        out, rows = found
        parts.keep(planned.owned, rows)
        return out, {name: Replace(states[:, -1, ...]) for name, states in rows.items()}

    def step(
        past: Arrays, part: Arrays, frame: Frame, length: Array, count: Array
    ) -> tuple[Array, Updates]:
        bridge = None
        if not call.prepared.is_direct:
            arrays = (*past.values(), *part.values())
            bridge = _bridge_of_step(call._replace(count=count), length, planned, *arrays)
        one = planned.runner.step if bridge is None else partial(bridge, planned)
        return one(past, part, frame)

    out, updates, rows = parts.step(step, past, inputs, planned.piece.inputs)
    parts.keep(planned.owned, rows)
    return out, updates


@_tolerant
def extend(
    call: BoundCall, cache: Cache, *, donate: bool, keeping: Keeping | None = None
) -> tuple[Array, Cache]:
    """The output for the new tokens, and the cache with them."""
    if donate:
        # The given cache is empty before the first write, so that it is refused if this fails.
        donated, cache = cache, holding(cache, cache.length, dict(cache.store))
        donated.store.clear()
    if call.prepared.is_direct:
        call.frame.may_overwrite = donate and not call.prepared.plan.shares_buffers
    parts = None if keeping is None else Parts(call, cache.length, keeping)
    bridge_of = partial(_bridge_of_step, call, cache.length)
    out, updates, _ = _steps(call, cache, bridge_of, parts)
    extended = _extended(updates, call, cache, donate=donate)
    if parts is not None:
        extended = parts.added_to(extended, cache)
    return finished(out, call), extended


@_tolerant
def extend_vjp(call: BoundCall, cache: Cache) -> tuple[Array, Cache, ExtendPullback]:
    """The results of `extend`, and its pullback.

    The pullback maps the cotangents of the output and the new buffers to the gradients of the
    inputs and of the old buffers, by name.
    """
    dtypes, frame = {key: buffer.dtype for key, buffer in cache.store.items()}, call.frame

    def bridge_of(planned: PlannedCall, *arrays: Array) -> BridgeOfStep | None:
        operators = _mapped_operators(call, planned, "step_backward", *arrays)
        return None if operators is None else operators.apply_step

    output, updates, trace = _steps(call, cache, bridge_of)

    @_tolerant
    def pullback(call: BoundCall, cotangent: Array, d_store: Arrays) -> tuple[Arrays, Arrays]:
        cotangents: Arrays = {call.prepared.plan.out: finished(cotangent, call, is_cotangent=True)}
        if call.non_finite is not None:
            d_store = call.non_finite.without_states(d_store)
        d_past: Arrays = {}
        for planned, past, inputs, out in reversed(trace):
            keys, used = dict(planned.buffers), dict(planned.owned)
            d_out = cotangents.get(planned.out)
            d_out = namespace(out).zeros_like(out) if d_out is None else d_out
            d_new = {
                name: d_store[key] if name in used else namespace(past[name]).zeros_like(past[name])
                for name, key in keys.items()
            }
            operators = _mapped_operators(
                call, planned, "step_backward", d_out, out, *d_new.values()
            )
            if operators is None:
                gradients, d_old = step_gradients_at(
                    d_out, d_new, planned.runner, past, inputs, frame, out
                )
            else:
                gradients, d_old = operators.step_gradients(
                    planned, past, inputs, frame, d_out, d_new
                )
            for name, value in planned.arguments:
                _accumulate(cotangents, value, gradients[name])
            for name, d_buffer in d_old.items():
                _accumulate(d_past, keys[name], d_buffer)
        d_old_store = {key: cast(d_past[key], dtype) for key, dtype in dtypes.items()}
        return _input_gradients(cotangents, call, cotangent), d_old_store

    extended = _extended(updates, call, cache, donate=False)
    return finished(output, call), extended, partial(pullback, call)


def _extended(updates: Updates, call: BoundCall, cache: Cache, *, donate: bool) -> Cache:
    """The cache with updated buffers; the states of a sequence with invalid arguments are NaN."""
    length, count, held, store = cache.length, call.count, call.frame.held, {}
    for key, update in updates.items():
        if call.invalid is not None and isinstance(update, Replace):
            update = Replace(nan_where_invalid(update.value, call.invalid))
        if call.non_finite is not None:
            update = call.non_finite.marked_update(key, update)
        old = cache.store[key]
        store[key] = updated(old, update, length, count, donate=donate, held=held)
    if KEY_MASK in cache.store:
        old, new = cache.store[KEY_MASK], Append(call.frame.valid_keys(call.sizes["t"]))
        store[KEY_MASK] = updated(old, new, length, count, donate=donate)
    if held is None:
        return holding(cache, length + count, store)
    # PyTorch makes an array of equal entries faster than it adds to one.
    new = namespace(length).full_like(length, held + count)
    return holding(cache, remembered(new, held + count), store)


def _accumulate(cotangents: Arrays, name: str, gradient: Array) -> None:
    """Add to a cotangent, in the wider dtype if two backends computed the terms."""
    total = cotangents.get(name)
    if total is not None:
        xp = namespace(total, gradient)
        dtype = xp.result_type(total.dtype, gradient.dtype)
        gradient = cast(total, dtype) + cast(gradient, dtype)
    cotangents[name] = gradient


def _input_gradients(cotangents: Arrays, call: BoundCall, cotangent: Array) -> Arrays:
    """The gradient of every input, in the input's dtype; 0 if the output does not depend on it.

    The caller may write to the gradients, so one that is the given cotangent itself is copied.
    """
    before = call.dtypes_before or {name: array.dtype for name, array in call.inputs.items()}
    gradients = {}
    for name, array in call.inputs.items():
        if name in cotangents:
            gradient = cast(cotangents[name], before[name])
            gradients[name] = fresh(gradient) if gradient is cotangent else gradient
        else:
            gradients[name] = namespace(array).zeros_like(array, dtype=before[name])
    return gradients


def finished(out: Array, call: BoundCall, *, is_cotangent: bool = False) -> Array:
    """An output, contiguous, or its cotangent; 0 at padding, NaN if arguments were out of range.

    If an input has a NaN or infinity, the outputs it reaches are NaN, and their cotangents 0.
    """
    if out.dtype != call.prepared.dtype:
        out = cast(out, call.prepared.dtype)
    valid = call.frame.q_valid
    if valid is not None:
        shape = (*valid.shape, *(1,) * (out.ndim - 2))
        out = zero_where_not(namespace(valid).reshape(valid, shape), out)
    if call.invalid is not None:
        out = nan_where_invalid(out, call.invalid)
    if call.non_finite is not None:
        out = call.non_finite.replaced(out, 0.0 if is_cotangent else NAN)
    return out if is_cotangent else call.prepared.framework.contiguous(out)


def _frame(planned: PlannedCall, call: BoundCall) -> Frame:
    """The frame of a planned call."""
    return reversed_keys(call.frame) if planned.is_reversed else call.frame


def _inputs(planned: PlannedCall, values: ByName, call: BoundCall) -> Arrays:
    inputs = {name: values[value] for name, value in planned.arguments}
    for name in planned.narrowed:
        inputs[name] = cast(inputs[name], call.prepared.dtype)
    return inputs


def _bridge_of_step(
    call: BoundCall, length: Array, planned: PlannedCall, *arrays: Array
) -> BridgeOfStep | None:
    """The function that runs a step and registers its gradient with the framework; or None."""
    if planned.backend is EMPTY:
        return None
    return call.prepared.framework.bridge_of_step(call, length, planned, *arrays)


def _mapped_operators(call: BoundCall, planned: PlannedCall, gradient: str, *arrays: Array) -> Tree:
    """The operators that `torch.vmap` maps; None outside it, and for the reference."""
    if planned.backend is REFERENCE:
        return None
    return call.prepared.framework.mapped_operators(planned, gradient, *arrays)
