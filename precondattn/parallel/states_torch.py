"""Recurrences whose tokens are divided among processes: states are passed on (`states.py`).

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
from precondattn.parallel.layouts import Order
from precondattn.parallel.piece_torch import Piece
from precondattn.parallel.scan_torch import Line, states_before, tensors_sent
from precondattn.parallel.states import (
    Step,
    columns_of_transition,
    is_scaled,
    step_of,
    with_transition,
)

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Leaf


MASKS = ("lengths",)
PASSED = "the states before them"


def refusal(leaf: Leaf, order: Order) -> str | None:
    """Why the states of a leaf have no scan; None where they have."""
    if order.name != "contiguous":
        return (
            f"gives processes tokens that are not consecutive, as {leaf} needs them; use "
            f"the layout 'contiguous'"
        )
    return None


def output(piece: Piece) -> Tensor:
    """The output of this process's tokens."""
    leaf, masks, processes = piece.leaf, {}, piece.processes
    valid = piece.masks.valid_of(processes.rank)
    if valid is not None:
        masks = {"lengths": valid.sum(1)}

    def steps() -> dict[str, Step]:
        with torch.no_grad():
            return steps_of_tokens(leaf, piece.inputs, piece.backend, masks)

    scan = _Scan(piece, processes.together(steps), masks)
    out: Tensor = _Scanned.apply(scan, *piece.inputs.values())
    return out


def bytes_sent(piece: Piece) -> dict[str, int]:
    """Forward, by this process to others, in the scan."""
    states = piece.leaf.init_cache(**piece.inputs).store.values()
    transitions, count = tensors_sent(line_of(piece))
    sent = {"states": 0, "transitions": 0}
    for state in states:
        width, size = state.dtype.itemsize, state.numel()
        sent["states"] += count * size * width
        if not is_scaled(piece.leaf):
            d, e = state.shape[-2:]
            size = size // e * columns_of_transition(piece.leaf, d)
        sent["transitions"] += transitions * size * width
    return sent


def steps_of_tokens(
    leaf: Leaf, inputs: Mapping[str, Tensor], backend: Any, masks: Mapping[str, Any]
) -> dict[str, Step]:
    """T and F of some tokens, of each state by its name in a cache."""
    cache = leaf.init_cache(**inputs)
    if not is_scaled(leaf):
        (key,) = cache.store
        return {key: step_of_tokens(leaf, inputs, backend, masks)}
    out, cache, pull = leaf.extend_vjp(cache, **inputs, backend=backend, **masks)
    ones = {key: torch.ones_like(state) for key, state in cache.store.items()}
    _, factors = pull(torch.zeros_like(out), ones)
    return {key: Step(factors[key], state, True) for key, state in cache.store.items()}


def step_of_tokens(
    leaf: Leaf, inputs: Mapping[str, Tensor], backend: Any, masks: Mapping[str, Any]
) -> Step:
    """T and F of some tokens."""
    e = inputs["v"].shape[-1]
    columns = columns_of_transition(leaf, inputs["k"].shape[-1])
    of_values = {name for name, pattern in leaf.inputs.items() if pattern.letters[-1] == "e"}
    wide = {n: pad(x, (0, columns)) if n in of_values else x for n, x in inputs.items()}
    cache = leaf.init_cache(**wide)
    ((key, state),) = cache.store.items()
    cache = _with_states(cache, {key: with_transition(state, e)})
    _, cache = leaf.extend(cache, **wide, backend=backend, **masks)
    (state,) = cache.store.values()
    return step_of(state, e)


@dataclass(frozen=True)
class _Scan:
    """What a call and its gradient need besides tensors that are differentiated."""

    piece: Piece
    steps: dict[str, Step]
    masks: Mapping[str, Any]


class _Scanned(torch.autograd.Function):  # type: ignore[misc]
    """The output of this process's tokens, from T and F of all."""

    @staticmethod
    def forward(ctx: Any, scan: _Scan, *arrays: Tensor) -> Tensor:
        leaf, processes = scan.piece.leaf, scan.piece.processes
        inputs = dict(zip(scan.piece.inputs, arrays, strict=True))
        cache = leaf.init_cache(**inputs)
        before = states_before(line_of(scan.piece), list(scan.steps.values()))
        if before is not None:
            cache = _with_states(cache, dict(zip(scan.steps, before, strict=True)))
        options = {"backend": scan.piece.backend, **scan.masks}
        out, _, ctx.pull = processes.together(lambda: leaf.extend_vjp(cache, **inputs, **options))
        ctx.scan = scan
        result: Tensor = out
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        scan: _Scan = ctx.scan
        gradients, d_past = scan.piece.processes.together(lambda: ctx.pull(cotangent))
        steps = [step.adjoint(d_past[key].to(step.state.dtype)) for key, step in scan.steps.items()]
        of_end = states_before(line_of(scan.piece)._replace(is_reversed=True), steps)
        if of_end is not None:
            gradients, _ = ctx.pull(cotangent, dict(zip(scan.steps, of_end, strict=True)))
        return (None, *(gradients[name] for name in scan.piece.inputs))


def line_of(piece: Piece) -> Line:
    """The processes, in their order."""
    _, group, rank, devices, _ = piece.processes
    return Line(group, rank, devices)


def _with_states(cache: Cache, states: Mapping[str, Tensor]) -> Cache:
    return cache._replace(
        store={key: state.to(cache.store[key].dtype) for key, state in states.items()}
    )
