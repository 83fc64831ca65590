"""Recurrences with tokens divided among processes: a scan of states (`states.py`).

In the forward pass a process computes T and F of its tokens, gets the state before them from a
scan, and computes its outputs from that state. This is up to three times the work of a call for the
delta rule, and twice for others. In the backward pass it computes the gradient of that state from
its outputs, gets the gradient of its last state from the scan in reverse, and computes the
gradients of its inputs.

A sequence may begin with a state S_0 that all processes have. The first process then uses T S_0 + F
in place of F. The last process may broadcast the last state. The gradient of the last state is the
sum of all processes' gradients. The gradient of S_0 is on the first process, and 0 on the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from precondattn.algebra.mechanism import Leaf
from precondattn.arrays import Tree
from precondattn.parallel.states import (
    SegmentBorders,
    StateMap,
    extended,
    kept,
    states_before,
    steps_of_tokens,
    with_states,
)
from precondattn.parallel.torch.exchange import passed
from precondattn.parallel.torch.processes import MeshProcesses
from precondattn.parallel.torch.step import DividedStep
from precondattn.parallel.ways import DividedPiece


def output(piece: DividedPiece) -> Tensor:
    """The output of this process's tokens."""
    out, _ = scanned(piece)
    return out


def scanned(
    piece: DividedPiece, begin: Mapping[str, Tensor] | None = None, *, with_end: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of this process's tokens, and on every process the states after all tokens.

    `begin` has the states before the first token, by their names in the leaf's cache. If `with_end`
    is False, no states are broadcast or returned.
    """
    leaf, processes = piece.leaf, piece.call.processes
    masks = piece.masks.of_extension(processes.rank)
    segments = piece.masks.segment
    borders = None if segments is None else SegmentBorders.of_segments(segments)

    def steps() -> dict[str, StateMap]:
        with torch.no_grad():
            steps = steps_of_tokens(leaf, piece.inputs, piece.call.backend, masks)
        is_open = None if borders is None else borders.is_open[processes.rank]
        return {key: step._replace(is_open=is_open) for key, step in steps.items()}

    of_tokens = processes.together(steps), masks, borders
    scan = _Scan(piece, processes, *of_tokens, begin is not None, with_end)
    begins = [] if begin is None else [begin[key] for key in scan.steps]
    out, *end = _Scanned.apply(scan, *piece.inputs.values(), *begins)
    return out, dict(zip(scan.steps, end, strict=True)) if with_end else {}


@dataclass(frozen=True)
class _Scan:
    """The arguments of a call and its gradient that are not differentiated."""

    piece: DividedPiece
    processes: MeshProcesses
    steps: dict[str, StateMap]
    masks: Mapping[str, Tensor]
    borders: SegmentBorders | None
    has_begin: bool
    with_end: bool

    @property
    def is_first(self) -> bool:
        return self.processes.rank == 0

    @property
    def is_last(self) -> bool:
        return self.processes.rank == self.processes.devices - 1

    def states_before(self, steps: Sequence[StateMap], *, is_reversed: bool) -> list[Tensor] | None:
        """The states before this process's tokens; in reverse, the gradients of its last ones.

        None for the first process, whose states are 0.
        """
        group, rank, devices = self.processes.group, self.processes.rank, self.processes.devices

        def from_before(arrays: Tree, distance: int) -> Tree:
            """The arrays of the process `distance` places before this one."""
            step = -distance if is_reversed else distance
            to, source = (r if 0 <= r < devices else None for r in (rank + step, rank - step))
            tensors = [x.contiguous() for pair in arrays for x in pair if x is not None]
            received = passed(group, tensors, to, source)
            if received is None:
                return None
            each = iter(received)
            return [tuple(None if x is None else next(each) for x in pair) for pair in arrays]

        return states_before(
            devices, steps, from_before, self.borders, rank, is_reversed=is_reversed
        )

    def of_segment(self, state: Tensor) -> Tensor:
        """A state before this process's tokens, or its gradient; 0 if a segment begins there."""
        borders = self.borders
        return kept(state, None if borders is None else borders.continues[self.processes.rank])

    def given_to_all(self, states: Sequence[Tensor]) -> list[Tensor]:
        """The states of the last process, on every process."""
        whole = [x.contiguous() if self.is_last else torch.empty_like(x) for x in states]
        for x in whole if self.processes.devices > 1 else ():
            dist.broadcast(x, group=self.processes.group, group_src=self.processes.devices - 1)
        return whole

    def added_up(self, gradients: Sequence[Tensor]) -> dict[str, Tensor] | None:
        """The gradients of the last states, summed over processes, on the last process."""
        sums = [x.clone(memory_format=torch.contiguous_format) for x in gradients]
        for x in sums if self.processes.devices > 1 else ():
            dist.reduce(x, group=self.processes.group, group_dst=self.processes.devices - 1)
        return dict(zip(self.steps, sums, strict=True)) if self.is_last else None


class _Scanned(torch.autograd.Function):  # type: ignore[misc]
    """The output of this process's tokens and the last states, as an autograd function."""

    @staticmethod
    def forward(ctx: FunctionCtx, scan: _Scan, *arrays: Tensor) -> Tensor:
        leaf, backend = scan.piece.leaf, scan.piece.call.backend
        inputs = dict(zip(scan.piece.inputs, arrays, strict=False))
        cache, steps = leaf.init_cache(**inputs), dict(scan.steps)
        if scan.has_begin and scan.is_first:
            begin = dict(zip(steps, arrays[len(inputs) :], strict=True))
            cache = with_states(cache, begin)
            steps = {
                key: step._replace(state=step.end_of(cache.store[key]))
                for key, step in steps.items()
            }
        before = scan.states_before(list(steps.values()), is_reversed=False)
        if before is not None:
            states = map(scan.of_segment, before)
            cache = with_states(cache, dict(zip(steps, states, strict=True)))
        out, after, ctx.pull = scan.processes.together(
            lambda: extended("extend_vjp", leaf, cache, inputs, backend, scan.masks)
        )
        ctx.scan = scan
        end = scan.given_to_all([after.store[key] for key in steps]) if scan.with_end else []
        return (out, *end)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: FunctionCtx, cotangent: Tensor, *d_end: Tensor) -> tuple[Tensor | None, ...]:
        scan: _Scan = ctx.scan
        d_last = scan.added_up(d_end) if scan.with_end else None
        gradients, d_past = scan.processes.together(lambda: ctx.pull(cotangent, d_last))
        d_before = {key: scan.of_segment(d) for key, d in d_past.items()}
        steps = [
            step.adjoint(d_before[key].to(step.state.dtype)) for key, step in scan.steps.items()
        ]
        of_end = scan.states_before(steps, is_reversed=True)
        if of_end is not None:
            d_states = dict(zip(scan.steps, of_end, strict=True))
            gradients, d_past = ctx.pull(cotangent, d_states)
        d_begin = []
        if scan.has_begin:
            d_begin = [d if scan.is_first else torch.zeros_like(d) for d in d_past.values()]
        return (None, *(gradients[name] for name in scan.piece.inputs), *d_begin)


def prefilled(
    piece: DividedPiece, begin: Mapping[str, Tensor] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of this process's tokens, and the states after all tokens by slot name.

    `begin` has the states before the first token.
    """
    keys = _keys(piece.leaf)
    begins = None if begin is None else {keys[slot]: state for slot, state in begin.items()}
    out, end = scanned(piece, begins, with_end=True)
    return out, {slot: end[key] for slot, key in keys.items()}


def stepped(step: DividedStep, parts: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of the new tokens, and the states after them by slot name."""
    keys = _keys(step.leaf)
    cache = step.leaf.init_cache(**step.inputs)
    cache = with_states(cache, {key: step.past[slot] for slot, key in keys.items()})
    out, cache = step.leaf.extend(
        cache,
        **dict(step.inputs),
        lengths=step.new.lengths,
        key_mask=step.new.key_mask,
        backend=step.new.backend,
    )
    return out, {slot: cache.store[key] for slot, key in keys.items()}


def _keys(leaf: Leaf) -> Mapping[str, str]:
    """The names of a leaf's states in its own cache, by slot name."""
    (keys,) = leaf.program.slot_keys
    return keys
