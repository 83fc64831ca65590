"""Ring attention between processes: keys and values go around a ring.

    λ = log Σ_r e^{λ_r},    o = Σ_r e^{λ_r − λ} o_r,    for LASER    o = log Σ_r e^{λ_r − λ + o_r}

where o_r is the output of this process's queries over the keys of process r, and λ_r the
log-sum-exp of the scores. In each of P − 1 rounds every process receives the keys that the process
before it had, and adds its queries' attention to them. With a causal mask, later tokens add
nothing. If processes have several parts (`layouts.py`), each part of the queries has its own o_r
and λ_r, over the parts of keys before it.

Packed segments are contiguous. So queries can see earlier keys only of the segment of the first
query, and only the queries of that segment see any.

In the backward pass, the gradients of each part follow from o and λ over all keys
(`ring_reads.py`). The gradients of the keys go around with the keys, in float32, and are complete
when they are back. A process thus has the keys of two other processes at a time, however long the
sequence is. Source: ring attention (arXiv 2310.01889).

With a divided cache, o_r and λ_r are computed from the new queries and the cached keys of process
r. One more part is the attention of the new tokens among themselves, which every process computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from precondattn.arrays import Shape, upcast
from precondattn.parallel.masks import crossing
from precondattn.parallel.ring_reads import MeanOfParts, WholeRows, read_of
from precondattn.parallel.torch.exchange import passed
from precondattn.parallel.torch.processes import tried
from precondattn.parallel.torch.step import DividedStep
from precondattn.parallel.ways import DividedPiece
from precondattn.spec.softmax import Softmax


def output(piece: DividedPiece) -> Tensor:
    """The output of this process's tokens."""
    return _Around.apply(RingCall(piece), *(piece.inputs[name] for name in "qkv"))


class RingPair(NamedTuple):
    """The attention of some of this process's queries to some of another process's keys."""

    over_parts: MeanOfParts
    queries: slice
    keys: slice
    seen_by: Tensor | None
    """Which of the queries (b, t) see any of the keys; None if all of them may"""


@dataclass(frozen=True)
class RingCall:
    """A call, and the processes that take part."""

    piece: DividedPiece

    def pairs(self, source: int) -> Iterator[RingPair]:
        """The pairs of this process's parts of queries with the keys of process `source`.

        With a causal mask there is no pair with later keys. All earlier parts of keys form one
        pair, and so do all later ones. Pairs of which no key is visible are left out.
        """
        leaf, masks, rank = self.piece.leaf, self.piece.masks, self.piece.call.rank
        everywhere = replace(leaf, causal=False)
        keys = self.piece.call.parts_of(source)
        for part in self.piece.call.parts_of(rank):
            before = [other for other in keys if other.first < part.first]
            after = [other for other in keys if other.first > part.first]
            if source == rank:
                over_parts = self._read(leaf, masks.of_rows(source, part.rows))
                yield RingPair(over_parts, part.rows, part.rows, None)
            for others, at in ((before, 0), ((), 0) if leaf.causal else (after, -1)):
                if not others:
                    continue
                rows = slice(others[0].rows.start, others[-1].rows.stop)
                of_keys = masks.of_rows(source, rows)
                seen_by = None
                if masks.segment is not None:
                    run, segments = masks.segment[rank][:, part.rows], of_keys.pop("segment_ids")
                    seen_by, visible = crossing(run, segments, at)
                    if not bool(visible.any()):
                        continue
                    of_keys["key_mask"] = visible & of_keys.get("key_mask", visible)
                yield RingPair(self._read(everywhere, of_keys), part.rows, rows, seen_by)

    def _read(self, softmax: Softmax, masks: dict[str, Tensor]) -> MeanOfParts:
        return read_of(softmax, {**masks, "backend": self.piece.call.backend})

    def rounds(self, *arrays: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """For each round, a process and its arrays (b, keys, …); this process comes first."""
        rank, devices = self.piece.call.rank, self.piece.call.devices
        current = [x.contiguous() for x in arrays]
        for distance in range(devices):
            source = (rank - distance) % devices
            yield source, current
            if distance + 1 < devices:
                current = self.passed_on(current, (source - 1) % devices)

    def passed_on(self, arrays: list[Tensor], source: int) -> list[Tensor]:
        """The arrays of the process before this one: keys of process `source`, and the like."""
        call = self.piece.call
        if call.devices == 1:
            return arrays
        shapes = [(x.shape[0], call.counts[source], *x.shape[2:]) for x in arrays]
        around = (call.rank + 1) % call.devices, (call.rank - 1) % call.devices
        return passed(call.processes.group, arrays, *around, shapes) or []


class _Around(torch.autograd.Function):  # type: ignore[misc]
    """The output of this process's queries. A process with an error passes keys on to the end.

    Half precision is sent as it is, and computed in float32.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, ring: RingCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        done: dict[int, tuple[Tensor, Tensor]] = {}
        error: Exception | None = None

        def attend(source: int, keys: Tensor, values: Tensor) -> None:
            """Merge the attention to a process's keys into `done`, by the first query of a part."""
            for over_parts, of_q, of_k, seen_by in ring.pairs(source):
                tokens = [upcast(x) for x in (q[:, of_q], keys[:, of_k], values[:, of_k])]
                out, lse = over_parts.attend(*tokens)
                if seen_by is not None:
                    lse = lse.masked_fill(~seen_by[..., None], -math.inf)
                if of_q.start in done:
                    out, lse = over_parts.merged(done[of_q.start], (out, lse))
                done[of_q.start] = out, lse

        for source, keys_values in ring.rounds(k, v):
            if error is None:
                _, error = tried(partial(attend, source, *keys_values))
        ring.piece.call.processes.agree(error)
        out, lse = (torch.cat(x, 1) for x in zip(*(done[i] for i in sorted(done)), strict=True))
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out.to(v.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: FunctionCtx, d_out: Tensor) -> tuple[Tensor | None, ...]:
        ring: RingCall = ctx.ring
        q, k, v, out, lse = ctx.saved_tensors
        d_q, *zeros = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        whole = out, lse, d_out.to(lse.dtype)
        error: Exception | None = None

        def pull(source: int, keys: Tensor, values: Tensor, d_k: Tensor, d_v: Tensor) -> None:
            """Add the gradients of this process's queries, and of a process's keys and values."""
            for over_parts, of_q, of_k, seen_by in ring.pairs(source):
                tokens = [upcast(x) for x in (q[:, of_q], keys[:, of_k], values[:, of_k])]
                out, lse, d_out = (x[:, of_q] for x in whole)
                rows = WholeRows.of_output(out, lse, d_out, seen_by)
                gradients = over_parts.pulled(tokens, rows)
                d_q[:, of_q] += gradients["q"]
                d_k[:, of_k] += gradients["k"]
                d_v[:, of_k] += gradients["v"]

        for source, of_keys in ring.rounds(k, v, *zeros):
            if error is None:
                _, error = tried(partial(pull, source, *of_keys))
        # The gradients of the next process's keys are complete, and go to that process.
        home = ring.passed_on(of_keys[2:], ring.piece.call.processes.rank)
        ring.piece.call.processes.agree(error)
        return (None, d_q.to(q.dtype), *(d.to(x.dtype) for d, x in zip(home, (k, v), strict=True)))


def prefilled(
    piece: DividedPiece, begin: Mapping[str, Tensor] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of this process's tokens, and their rows by slot name."""
    return output(piece), {"key": piece.inputs["k"], "value": piece.inputs["v"]}


def part_shape(step: DividedStep) -> Shape:
    """The shape of o_r and λ_r in one tensor (b, t, h, e + 1)."""
    return (*step.inputs["q"].shape[:3], step.inputs["v"].shape[-1] + 1)


def part(step: DividedStep) -> Tensor:
    """o_r and λ_r over this process's keys."""
    leaf, q = step.leaf, upcast(step.inputs["q"])
    if not step.rows:
        empty = q.new_zeros(part_shape(step))
        empty[..., -1] = -math.inf
        return empty
    keys, values = upcast(step.past["key"]), upcast(step.past["value"])
    out, lse = read_of(replace(leaf, causal=False), step.of_past()).attend(q, keys, values)
    return torch.cat([out, lse[..., None]], -1)


def stepped(step: DividedStep, parts: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of the new tokens, and their rows by slot name."""
    assert parts is not None  # `part_shape` is not None.
    q, k, v = (step.inputs[name] for name in "qkv")
    over_parts = read_of(step.leaf, step.of_new())
    whole = over_parts.attend(upcast(q), upcast(k), upcast(v))
    for packed in parts:
        whole = over_parts.merged(whole, (packed[..., :-1], packed[..., -1]))
    return whole[0].to(v.dtype), {"key": k, "value": v}
