"""Running a plan: the output, the gradient in reverse, and the extension of a cache.

The dtypes of intermediate results and of their cotangents are described in `cotangents.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from precondattn.arrays import (
    Array,
    Arrays,
    Residuals,
    Tree,
    cast,
    counts_flops,
    dtype_name,
    fresh,
    namespace,
    read_only,
    transforms_of,
    wants_gradient,
    zero_where_not,
)
from precondattn.cache import KEY_MASK, Append, Cache, Replace, Update, Updates, updated
from precondattn.cache.kinds import holding
from precondattn.dispatch.discovery import REFERENCE
from precondattn.dispatch.empty import EMPTY
from precondattn.dispatch.plan import CallPlan, PlannedCall
from precondattn.execution.arguments import BoundCall
from precondattn.execution.cotangents import gradients_at, step_gradients_at
from precondattn.execution.masks import nan_where_invalid
from precondattn.frame import Frame


def forward(plan: CallPlan, call: BoundCall) -> Array:
    """The output; differentiable by the arrays' own framework."""
    values, is_direct = dict(call.inputs), call.prepared.is_direct
    for planned in plan.calls:
        inputs = call.inputs if planned.is_whole else _inputs(planned, values, call)
        if is_direct:
            values[planned.out] = planned.runner.forward(inputs, call.frame)[0]
        else:
            values[planned.out] = _bridge(planned, call)(planned, inputs, call.frame)
    return finished(values[plan.out], call)


def vjp(plan: CallPlan, call: BoundCall) -> tuple[Array, Callable[[Array], Arrays]]:
    """The output, and the function from its cotangent to the gradients by input name."""
    values = dict(call.inputs)
    trace: list[tuple[PlannedCall, Arrays, Array, Residuals]] = []
    for planned in plan.calls:
        inputs = _inputs(planned, values, call)
        out, residuals = _with_residuals(planned, inputs, call)
        values[planned.out] = out
        # The private copy would hide that a backend writes to it.
        trace.append((planned, inputs, read_only(out), residuals))

    def pullback(cotangent: Array) -> Arrays:
        cotangents: Arrays = {plan.out: used_part(cotangent, call)}
        for planned, inputs, out, residuals in reversed(trace):
            if planned.out not in cotangents:
                continue
            gradients = _gradients(
                planned, inputs, call.frame, out, residuals, cotangents[planned.out]
            )
            for name, value in planned.arguments:
                _accumulate(cotangents, value, gradients[name])
        return _apart(_input_gradients(cotangents, call), cotangent)

    out = finished(values[plan.out], call)
    # The caller may write to what is returned, and the pullback reads it.
    return fresh(out) if out is values[plan.out] else out, pullback


def gradients_from_lse(
    plan: CallPlan, call: BoundCall, out: Array, lse: Array, cotangent: Array
) -> Arrays | None:
    """The gradients of softmax attention whose output and log-sum-exp are known by other means.

    None where the backend needs its own forward pass.
    """
    (planned,) = plan.calls
    residuals = planned.runner.residuals_from_lse(lse)
    if residuals is None:
        return None
    inputs = _inputs(planned, call.inputs, call)
    cotangent = used_part(cotangent, call)
    gradients = gradients_at(cotangent, planned.runner, inputs, call.frame, out, residuals)
    return _input_gradients({value: gradients[n] for n, value in planned.arguments}, call)


class ExecutedStep(NamedTuple):
    """A planned call of an extension, with its arguments and output."""

    planned: PlannedCall
    past: Arrays
    inputs: Arrays
    out: Array


def _steps(
    plan: CallPlan, call: BoundCall, cache: Cache, run: Callable[..., tuple[Array, Tree]] | None
) -> tuple[Array, dict[str, Update], list[ExecutedStep]]:
    """The output, the update of every buffer, and the executed steps; None runs them directly."""
    values, frame = dict(call.inputs), call.frame
    updates: dict[str, Update] = {}
    trace: list[ExecutedStep] = []
    for planned in plan.calls:
        inputs = call.inputs if planned.is_whole else _inputs(planned, values, call)
        past = {name: cache.store[key] for name, key in planned.buffers}
        if run is None:
            out, step_updates = planned.runner.step(past, inputs, frame)
        else:
            out, step_updates = run(planned, past, inputs, frame)
        values[planned.out] = out
        for name, key in planned.owned:
            updates[key] = step_updates[name]
        trace.append(ExecutedStep(planned, past, inputs, out))
    return values[plan.out], updates, trace


def extend(
    plan: CallPlan, call: BoundCall, cache: Cache, count: Array, *, donate: bool
) -> tuple[Array, Cache]:
    """The output for the new tokens, and the cache with them."""
    run = None
    if call.prepared.is_direct:
        call.frame.may_overwrite = donate and not plan.shares_buffers
    else:
        run = partial(_bridged_step, call=call, length=cache.length, count=count)
    out, updates, _ = _steps(plan, call, cache, run)
    store = _updated_store(updates, call, cache, count, donate=donate)
    if KEY_MASK in cache.store:
        old_mask, new_mask = cache.store[KEY_MASK], Append(call.frame.valid_keys(call.sizes["t"]))
        store[KEY_MASK] = updated(old_mask, new_mask, cache.length, count, donate=donate)
    extended = holding(cache, _new_length(cache.length, count, call.frame.held), store)
    if donate:
        cache.store.clear()
    return finished(out, call), extended


def _new_length(length: Array, count: Array, held: int | None) -> Array:
    # Where the lengths are known to be equal, PyTorch makes an array faster than it adds to one.
    return length + count if held is None else namespace(length).full_like(length, held + count)


def extend_vjp(
    plan: CallPlan, call: BoundCall, cache: Cache, count: Array
) -> tuple[Array, Cache, Callable[[Array, Arrays], tuple[Arrays, Arrays]]]:
    """`extend`, and its pullback.

    The pullback maps the cotangents of output and new buffers to the gradients of the inputs and
    of the old buffers, by name.
    """
    dtypes = {key: buffer.dtype for key, buffer in cache.store.items()}
    run = None if call.prepared.is_direct else _mapped_step
    output, updates, trace = _steps(plan, call, cache, run)

    def pullback(cotangent: Array, d_store: Arrays) -> tuple[Arrays, Arrays]:
        cotangents: Arrays = {plan.out: used_part(cotangent, call)}
        if call.non_finite is not None:
            d_store = call.non_finite.without_states(d_store)
        d_past: Arrays = {}
        for planned, past, inputs, out in reversed(trace):
            keys, used = dict(planned.buffers), dict(planned.owned)
            d_out = cotangents.get(planned.out)
            gradients, d_buffers = _step_gradients(
                planned,
                past,
                inputs,
                call.frame,
                out,
                namespace(out).zeros_like(out) if d_out is None else d_out,
                {
                    name: d_store[key]
                    if name in used
                    else namespace(past[name]).zeros_like(past[name])
                    for name, key in keys.items()
                },
            )
            for name, value in planned.arguments:
                _accumulate(cotangents, value, gradients[name])
            for name, d_buffer in d_buffers.items():
                _accumulate(d_past, keys[name], d_buffer)
        d_old_store = {key: cast(d_past[key], dtype) for key, dtype in dtypes.items()}
        return _apart(_input_gradients(cotangents, call), cotangent), d_old_store

    store = _updated_store(updates, call, cache, count, donate=False)
    extended = holding(cache, _new_length(cache.length, count, call.frame.held), store)
    return finished(output, call), extended, pullback


def _updated_store(
    updates: Mapping[str, Update], call: BoundCall, cache: Cache, count: Array, *, donate: bool
) -> Arrays:
    """The updated buffers; the state of a sequence with arguments out of range is NaN."""
    store = {}
    for key, update in updates.items():
        if call.invalid is not None and isinstance(update, Replace):
            update = Replace(nan_where_invalid(update.value, call.invalid))
        if call.non_finite is not None:
            update = call.non_finite.marked_update(key, update)
        store[key] = updated(
            cache.store[key],
            update,
            cache.length,
            count,
            donate=donate,
            held=call.frame.held,
        )
    return store


def _accumulate(cotangents: Arrays, name: str, gradient: Array) -> None:
    known = cotangents.get(name)
    cotangents[name] = gradient if known is None else _sum(known, gradient)


def _input_gradients(cotangents: Arrays, call: BoundCall) -> Arrays:
    """The gradient of every input, in its own dtype; 0 where the output does not depend on it."""
    before = call.dtypes_before or {name: array.dtype for name, array in call.inputs.items()}
    return {
        name: cast(cotangents[name], before[name])
        if name in cotangents
        else namespace(array).zeros_like(array, dtype=before[name])
        for name, array in call.inputs.items()
    }


def finished(out: Array, call: BoundCall) -> Array:
    """An output, 0 at padding, and NaN where inputs or other arguments can not be used."""
    out = _without_padding(out, call)
    return out if call.non_finite is None else call.non_finite.marked(out)


def used_part(cotangent: Array, call: BoundCall) -> Array:
    """A cotangent, 0 at padding and where the output is NaN because of an input."""
    cotangent = _without_padding(cotangent, call)
    return cotangent if call.non_finite is None else call.non_finite.without(cotangent)


def _without_padding(out: Array, call: BoundCall) -> Array:
    """An output or its cotangent, 0 at padding, and NaN where arguments were out of range."""
    if dtype_name(out) != call.prepared.dtype:
        out = _in_call_dtype(out, call)
    valid = call.frame.q_valid
    if valid is not None:
        shape = (*valid.shape, *(1,) * (out.ndim - 2))
        out = zero_where_not(namespace(valid).reshape(valid, shape), out)
    return out if call.invalid is None else nan_where_invalid(out, call.invalid)


def _inputs(planned: PlannedCall, values: Mapping[str, Array], call: BoundCall) -> Arrays:
    inputs = {name: values[value] for name, value in planned.arguments}
    for name in planned.narrowed:
        inputs[name] = _in_call_dtype(inputs[name], call)
    return inputs


def _in_call_dtype(array: Array, call: BoundCall) -> Array:
    if dtype_name(array) == call.dtype:
        return array
    # Taken from an input, because not every namespace has bfloat16.
    dtype = next(a.dtype for a in call.inputs.values() if dtype_name(a) == call.dtype)
    return namespace(array).astype(array, dtype)


def _apart(gradients: Arrays, cotangent: Array) -> Arrays:
    """The gradients, which a caller may write to: a copy where one is the cotangent itself."""
    return {n: fresh(d) if d is cotangent else d for n, d in gradients.items()}


def _sum(a: Array, b: Array) -> Array:
    """a + b in the wider of their dtypes, which differ if two backends computed them."""
    xp = namespace(a, b)
    dtype = xp.result_type(a.dtype, b.dtype)
    return cast(a, dtype) + cast(b, dtype)


def _bridge(planned: PlannedCall, call: BoundCall) -> Callable[..., Array]:
    """The function that runs a call and registers its gradient with the framework's autograd."""
    is_differentiable = planned.runner.differentiable
    if planned.backend is EMPTY or (call.prepared.is_recorded and is_differentiable):
        return _plain
    if call.prepared.is_recorded:
        from precondattn.execution.torch.recorded import apply

        return apply
    if call.library == "torch" and (not is_differentiable or _is_counted(call)):
        from precondattn.execution.torch.autograd import apply

        return apply
    if call.library == "jax" and not is_differentiable:
        from precondattn.execution.jax.autograd import apply

        return apply
    return _plain


def _is_counted(call: BoundCall) -> bool:
    """Whether PyTorch counts FLOPs, which operators have; a transform can not use operators."""
    return counts_flops() and not transforms_of(*call.inputs.values())


def _bridged_step(
    planned: PlannedCall,
    past: Arrays,
    inputs: Arrays,
    frame: Frame,
    *,
    call: BoundCall,
    length: Array,
    count: int,
) -> tuple[Array, Updates]:
    arrays = (*past.values(), *inputs.values())
    if planned.backend is EMPTY:
        return _plain_step(planned, past, inputs, frame)
    if call.library == "torch":
        if wants_gradient(*arrays):
            if not planned.runner.differentiable:
                from precondattn.execution.torch.autograd import apply_step

                return apply_step(planned, past, inputs, frame)
        elif _is_mapped(planned, *arrays) or (
            (planned.is_symbolic or counts_flops()) and not transforms_of(*arrays)
        ):
            from precondattn.execution.torch.autograd import apply_extension

            return apply_extension(planned, past, inputs, frame, length, count)
    elif call.library == "jax" and _has_gradient_of_step(planned, call):
        from precondattn.execution.jax import autograd

        return autograd.apply_step(planned, past, inputs, frame)
    return _plain_step(planned, past, inputs, frame)


def _has_gradient_of_step(planned: PlannedCall, call: BoundCall) -> bool:
    """Whether JAX gets the gradient of a step from the backend, as it has to where the step is a
    kernel, or where cotangents in float16 have to be divided."""
    from precondattn.execution.jax.second_derivative import differentiates_step

    is_narrow = call.dtype == "float16" and not planned.backend.wide_values
    is_differentiable = planned.runner.differentiable or differentiates_step(
        planned.backend, planned.piece
    )
    return planned.has_gradient_of_step and (is_narrow or not is_differentiable)


def _is_mapped(planned: PlannedCall, *arrays: Array) -> bool:
    """Whether `torch.vmap` maps a call as an operator: the reference is mapped by itself."""
    return planned.backend is not REFERENCE and transforms_of(*arrays) == {"vmap"}


def _with_residuals(
    planned: PlannedCall, inputs: Arrays, call: BoundCall
) -> tuple[Array, Residuals]:
    if not call.prepared.is_direct and _is_mapped(planned, *inputs.values()):
        from precondattn.execution.torch import autograd

        return autograd.with_residuals(planned, inputs, call.frame)
    return planned.runner.forward(inputs, call.frame)


def _gradients(
    planned: PlannedCall,
    inputs: Arrays,
    frame: Frame,
    out: Array,
    residuals: Tree,
    cotangent: Array,
) -> Arrays:
    if _is_mapped(planned, cotangent, out):
        from precondattn.execution.torch import autograd

        return autograd.gradients(planned, inputs, frame, out, residuals, cotangent)
    return gradients_at(cotangent, planned.runner, inputs, frame, out, residuals)


def _mapped_step(
    planned: PlannedCall, past: Arrays, inputs: Arrays, frame: Frame
) -> tuple[Array, Updates]:
    if _is_mapped(planned, *past.values(), *inputs.values()):
        from precondattn.execution.torch.autograd import apply_step

        return apply_step(planned, past, inputs, frame)
    return _plain_step(planned, past, inputs, frame)


def _step_gradients(
    planned: PlannedCall,
    past: Arrays,
    inputs: Arrays,
    frame: Frame,
    out: Array,
    cotangent: Array,
    d_buffers: Arrays,
) -> tuple[Arrays, Arrays]:
    if _is_mapped(planned, cotangent, out, *d_buffers.values()):
        from precondattn.execution.torch import autograd

        return autograd.step_gradients(planned, past, inputs, frame, cotangent, d_buffers)
    return step_gradients_at(cotangent, d_buffers, planned.runner, past, inputs, frame, out)


def _plain_step(
    planned: PlannedCall, past: Arrays, inputs: Arrays, frame: Frame
) -> tuple[Array, Updates]:
    return planned.runner.step(past, inputs, frame)


def _plain(planned: PlannedCall, inputs: Arrays, frame: Frame) -> Array:
    out: Array = planned.runner.forward(inputs, frame)[0]
    return out
