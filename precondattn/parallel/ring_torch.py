"""Softmax attention to keys and values that go around a ring of processes.

    λ = log Σ_r e^{λ_r},    o = Σ_r e^{λ_r − λ} o_r

with o_r and λ_r, the log-sum-exp of the scores, of this process's queries and the keys of process
r. In P − 1 rounds every process gets the keys of the one before it, and adds its queries' attention
to them: causally, nothing for later tokens. A process has consecutive tokens, or in the layout
`zigzag` two parts of them (`layouts.py`); then o_r and λ_r are those of each pair of parts.

Backward, with w_r = e^{λ_r − λ},

    do_r = w_r do,    dλ_r = w_r do·(o_r − o),

are the cotangents of each part, which is computed again. The gradients of the keys go around with
them, in float32, and are complete when they are back. So a process has the keys of two others at a
time, however long the sequence is. Source: ring attention (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from precondattn.arrays import upcast
from precondattn.parallel.call_torch import Call, Processes, tried
from precondattn.parallel.layouts import parts_of
from precondattn.partial_attention import merge, with_lse, with_lse_vjp
from precondattn.spec.read import MEAN
from precondattn.spec.softmax import Softmax

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Mechanism


MASKS: tuple[str, ...] = ()
PASSED = "the keys of two other processes at a time"


def refusal(mechanism: Mechanism) -> str | None:
    """Why softmax attention can not go around a ring; None where it can."""
    (leaf,) = mechanism.program.leaves
    assert isinstance(leaf, Softmax)  # It has been chosen by that.
    if set(mechanism.inputs) != {"q", "k", "v"} or leaf.window is not None or leaf.read != MEAN:
        return (
            "divides softmax attention without bias, gate, sink or window; use the layout 'heads'"
        )
    return None


def output(call: Call, processes: Processes, *, is_zigzag: bool = False) -> Tensor:
    """The output of this process's tokens."""
    ring = Ring(call.mechanism, processes, call.tokens["s"], call.backend, is_zigzag)
    out: Tensor = _Around.apply(ring, *(call.bound.inputs[name] for name in "qkv"))
    return out


def bytes_sent(call: Call, processes: Processes) -> dict[str, int]:
    """Forward, by this process to the next one."""
    counts, rank = call.tokens["s"], processes.rank
    around = [counts[(rank - i) % processes.devices] for i in range(processes.devices - 1)]
    return {
        name: sum(around) * (call.bound.inputs[name][:, :1].numel() * x.dtype.itemsize)
        for name, x in call.bound.inputs.items()
        if name != "q"
    }


@dataclass(frozen=True)
class Ring:
    """A call, and who takes part."""

    mechanism: Mechanism
    processes: Processes
    counts: tuple[int, ...]
    """The number of keys of every process"""
    backend: Any
    is_zigzag: bool

    def parts(self, process: int) -> list[tuple[int, slice]]:
        """The parts that a process has, by their number in the sequence, and where they are."""
        count = self.counts[process]
        if not self.is_zigzag:
            return [(process, slice(0, count))]
        first, second = parts_of(process, self.processes.devices)
        return [(first, slice(0, count // 2)), (second, slice(count // 2, count))]

    def pairs(self, source: int) -> Iterator[tuple[Softmax, slice, slice]]:
        """The attention of each part of this process's queries to each part of a process's keys.

        Causally there is none to later parts.
        """
        (leaf,) = self.mechanism.program.leaves
        assert isinstance(leaf, Softmax)
        for of_queries, queries in self.parts(self.processes.rank):
            for of_keys, keys in self.parts(source):
                if of_queries == of_keys or not leaf.causal:
                    yield leaf, queries, keys
                elif of_keys < of_queries:
                    yield replace(leaf, causal=False), queries, keys

    def rounds(self, *arrays: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Whose keys this process has, and arrays (b, keys, …) of that process: its own first."""
        rank, devices = self.processes.rank, self.processes.devices
        held = [x.contiguous() for x in arrays]
        for distance in range(devices):
            source = (rank - distance) % devices
            yield source, held
            if distance + 1 < devices:
                held = self.passed_on(held, (source - 1) % devices)

    def passed_on(self, held: list[Tensor], source: int) -> list[Tensor]:
        """What the process before this one has, of the keys of `source`."""
        _, group, rank, devices, _ = self.processes
        if devices == 1:
            return held
        after, before = (dist.get_global_rank(group, (rank + step) % devices) for step in (1, -1))
        received, operations = [], []
        for i, x in enumerate(held):
            received.append(x.new_empty(x.shape[0], self.counts[source], *x.shape[2:]))
            operations += [
                dist.P2POp(dist.isend, x, after, group, tag=i),
                dist.P2POp(dist.irecv, received[i], before, group, tag=i),
            ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received


class _Around(torch.autograd.Function):  # type: ignore[misc]
    """The output of this process's queries. A process that has an error passes keys on to the end.

    Half precision goes around, and is computed in float32.
    """

    @staticmethod
    def forward(ctx: Any, ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        done: dict[int, tuple[Tensor, Tensor]] = {}
        error: Exception | None = None
        for source, held in ring.rounds(k, v):
            if error is None:
                _, error = tried(partial(_attend, ring, done, source, q, *held))
        ring.processes.agree(error)
        out, lse = (torch.cat(x, 1) for x in zip(*(done[i] for i in sorted(done)), strict=True))
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out.to(v.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_out: Tensor) -> Any:
        ring: Ring = ctx.ring
        q, k, v, out, lse = ctx.saved_tensors
        d_q, *zeros = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        given = (q, out, lse, d_out.to(lse.dtype))
        error: Exception | None = None
        for source, held in ring.rounds(k, v, *zeros):
            if error is None:
                _, error = tried(partial(_pull, ring, source, given, held, d_q))
        # Those of the next process's keys are complete, and go to it.
        home = ring.passed_on(held[2:], ring.processes.rank)
        ring.processes.agree(error)
        return (None, d_q.to(q.dtype), *(d.to(x.dtype) for d, x in zip(home, (k, v), strict=True)))


def _attend(
    ring: Ring,
    done: dict[int, tuple[Tensor, Tensor]],
    source: int,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Add the attention to a process's keys to what is done, by the first token of its part."""
    for softmax, of_q, of_k in ring.pairs(source):
        tokens = (upcast(x) for x in (q[:, of_q], keys[:, of_k], values[:, of_k]))
        part = with_lse(softmax, *tokens, backend=ring.backend)
        if of_q.start in done:
            part = merge(*zip(done[of_q.start], part, strict=True))
        done[of_q.start] = part


def _pull(
    ring: Ring, source: int, given: tuple[Tensor, ...], held: list[Tensor], d_q: Tensor
) -> None:
    """Add the gradients of this process's queries, and of a process's keys and values."""
    q, out, lse, d_out = given
    keys, values, d_k, d_v = held
    for softmax, of_q, of_k in ring.pairs(source):
        tokens = (upcast(x) for x in (q[:, of_q], keys[:, of_k], values[:, of_k]))
        (own, own_lse), pull = with_lse_vjp(softmax, *tokens, backend=ring.backend)
        d_own = torch.exp(own_lse - lse[:, of_q])[..., None] * d_out[:, of_q]
        d_lse = (d_own * (own - out[:, of_q])).sum(-1)
        gradients = pull(d_own, d_lse)
        d_q[:, of_q] += gradients["q"]
        d_k[:, of_k] += gradients["k"]
        d_v[:, of_k] += gradients["v"]
