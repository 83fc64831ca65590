"""The layout `contiguous`: every process keeps its tokens, and states are passed on (`states.py`).

Forward, a process computes T and F of its tokens, gets the state before them from a scan, and
computes its outputs from that: up to three times the work of a call for the delta rule, and twice
for others. Backward, it computes the gradient of that state from its outputs, gets the gradient of
its last state from the scan in reverse, and computes those of its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from precondattn.cache import Cache
from precondattn.parallel import states
from precondattn.parallel.call_torch import Call, Processes
from precondattn.parallel.scan_torch import Line, state_before, tensors_sent
from precondattn.parallel.states import Step, columns_of_transition, step_of, with_transition

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Mechanism


MASKS = ("lengths",)
PASSED = "the state before them"


def refusal(mechanism: Mechanism) -> str | None:
    """Why the states of a mechanism have no scan; None where they have."""
    return states.refusal(mechanism)


def output(call: Call, processes: Processes) -> Tensor:
    """The output of this process's tokens."""
    inputs, masks = call.bound.inputs, {}
    if "lengths" in call.bound.masks:
        lengths = torch.as_tensor(call.bound.masks["lengths"], device=processes.device)
        counts = call.tokens["s"]
        _check_lengths(processes.owner, lengths, call.sizes["b"], sum(counts))
        before, own = sum(counts[: processes.rank]), counts[processes.rank]
        masks = {"lengths": (lengths - before).clamp(0, own)}

    def step() -> Step:
        with torch.no_grad():
            return step_of_tokens(call.mechanism, inputs, call.backend, masks)

    line = Line(processes.group, processes.rank, processes.devices)
    own_step = processes.together(step)
    scan = _Scan(call.mechanism, line, tuple(inputs), own_step, call, masks, processes)
    out: Tensor = _Scanned.apply(scan, *inputs.values())
    return out


def _check_lengths(owner: str, lengths: Tensor, b: int, s: int) -> None:
    if tuple(lengths.shape) != (b,):
        raise ValueError(f"{owner}: lengths must have shape ({b},); found {tuple(lengths.shape)}")
    if bool(((lengths < 0) | (lengths > s)).any()):
        raise ValueError(f"{owner}: lengths must be in 0 … {s}; found {lengths.tolist()}")


def bytes_sent(call: Call, processes: Processes) -> dict[str, int]:
    """Forward, by this process to others, in the scan."""
    mechanism, inputs = call.mechanism, call.bound.inputs
    (state,) = mechanism.init_cache(**inputs).store.values()
    d, e = state.shape[-2:]
    of_transition = state.numel() // e * columns_of_transition(mechanism, d)
    transitions, count = tensors_sent(Line(processes.group, processes.rank, processes.devices))
    width = state.dtype.itemsize
    return {
        "states": count * state.numel() * width,
        "transitions": transitions * of_transition * width,
    }


def step_of_tokens(
    mechanism: Mechanism, inputs: Mapping[str, Tensor], backend: Any, masks: Mapping[str, Any]
) -> Step:
    """T and F of some tokens."""
    e = inputs["v"].shape[-1]
    columns = columns_of_transition(mechanism, inputs["k"].shape[-1])
    of_values = {name for name, pattern in mechanism.inputs.items() if pattern.letters[-1] == "e"}
    wide = {n: pad(x, (0, columns)) if n in of_values else x for n, x in inputs.items()}
    cache = mechanism.init_cache(**wide)
    (state,) = cache.store.values()
    cache = _with_state(cache, with_transition(state, e))
    _, cache = mechanism.extend(cache, **wide, backend=backend, **masks)
    (state,) = cache.store.values()
    return step_of(state, e)


@dataclass(frozen=True)
class _Scan:
    """What a call and its gradient need besides tensors that are differentiated."""

    mechanism: Mechanism
    line: Line
    names: tuple[str, ...]
    step: Step
    call: Call
    masks: Mapping[str, Any]
    processes: Processes


class _Scanned(torch.autograd.Function):  # type: ignore[misc]
    """The output of this process's tokens, from T and F of all."""

    @staticmethod
    def forward(ctx: Any, scan: _Scan, *arrays: Tensor) -> Tensor:
        inputs = dict(zip(scan.names, arrays, strict=True))
        cache = scan.mechanism.init_cache(**inputs)
        before = state_before(scan.line, scan.step)
        if before is not None:
            cache = _with_state(cache, before)
        options = {"backend": scan.call.backend, **scan.masks}
        out, _, ctx.pull = scan.processes.together(
            lambda: scan.mechanism.extend_vjp(cache, **inputs, **options)
        )
        ctx.scan, (ctx.key,) = scan, cache.store
        result: Tensor = out
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        scan: _Scan = ctx.scan
        gradients, d_past = scan.processes.together(lambda: ctx.pull(cotangent))
        step = scan.step.adjoint(d_past[ctx.key].to(scan.step.state.dtype))
        of_end = state_before(scan.line._replace(is_reversed=True), step)
        if of_end is not None:
            gradients, _ = ctx.pull(cotangent, {ctx.key: of_end})
        return (None, *(gradients[name] for name in scan.names))


def _with_state(cache: Cache, state: Tensor) -> Cache:
    (key,) = cache.store
    return cache._replace(store={key: state.to(cache.store[key].dtype)})
