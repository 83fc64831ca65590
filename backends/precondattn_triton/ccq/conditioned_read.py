"""CCQ's query on its own, and together with a backbone that goes over the same keys.

    y1 = conditioned_query(q, k, contraction); y2 = l2_norm(x=k); out = gated_delta(q=y1, k=y2, …)

The states of the backbone do not depend on the queries, and so one pass over the keys carries both
them and the moments: a tile of keys that has been read is multiplied with both (`chunk_states.py`).
Keys are brought to length 1 once, for both. There is no more to share. What tokens of a chunk read
of each other is not the same for q̄ and q^c; K Kᵀ is asked for by the delta rule alone; backward,
the states' gradients are made of q^c and W, and the moments' of q̄.

A backbone with a gate for each key channel goes over keys that have faded, which are others: there
the query has a pass of its own. So it has where a cache is extended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from precondattn.algebra.program import Program
from precondattn.backend import ArraySpec, Request
from precondattn.frame import Frame
from precondattn.spec.l2_norm import L2Norm
from precondattn.spec.linear_family import queries_of_states, rows_of_states
from precondattn.spec.recurrence import Stream
from precondattn_triton.ccq.conditioned_query import Conditioned, KeyGradients
from precondattn_triton.precision import is_half
from precondattn_triton.recurrence.chunk_arrays import Call, tokens_of_chunk
from precondattn_triton.recurrence.chunkwise import carry, prepare, read
from precondattn_triton.recurrence.chunkwise_gradient import gradients
from precondattn_triton.recurrence.leaves import (
    Recurrence,
    form_of,
    gradients_of,
    is_plain,
    stream_of,
)

Tensors = Mapping[str, Tensor]

SHARING = (torch.bfloat16,)
"""Keys of these dtypes are gone over once. In float32 and float16, whose products take three times
the factors, the registers do not hold states and moments at once."""


class RunningCovariance(Recurrence):
    """CCQ's query by all keys so far: a full call by its own kernels, a step by the recurrence."""

    def forward(self, leaf: Any, x: Tensors, frame: Frame) -> tuple[Tensor, tuple[Tensor, ...]]:
        query = Conditioned(leaf.eps, x, frame)
        query.carry()
        out = torch.empty(x["q"].shape, dtype=x["q"].dtype, device=x["q"].device)
        query.contract(out)
        return out, ()

    def backward(
        self,
        leaf: Any,
        x: Tensors,
        frame: Frame,
        out: Tensor,
        residuals: tuple[Tensor, ...],
        cotangent: Tensor,
    ) -> dict[str, Tensor]:
        query = Conditioned(leaf.eps, x, frame)
        query.carry()
        found = query.backward(cotangent)
        return {name: gradient.to(x[name].dtype) for name, gradient in found.items()}


class Wiring(NamedTuple):
    """What the query and the backbone read, by the group's names of it."""

    query: dict[str, str]
    """Of q, k and contraction."""
    backbone: dict[str, str]
    """Of the backbone's inputs but q, and k, if it reads k̄."""
    reads_unit_keys: bool


@cache
def wiring(program: Program) -> Wiring | None:
    """Of a backbone that reads with q^c; None where the calls are wired otherwise."""
    first, *norms, last = program.calls
    own, read_by = dict(first.arguments), dict(last.arguments)
    keys = own["k"]
    for norm in norms:
        if norm.leaf != L2Norm(first.leaf.eps) or dict(norm.arguments) != {"x": keys}:
            return None
        keys = norm.out
    if read_by.pop("q") != first.out or read_by.pop("k") != keys:
        return None
    if first.out in read_by.values() or keys in read_by.values():
        return None
    return Wiring(own, read_by | ({} if norms else {"k": keys}), bool(norms))


class ConditionedRead:
    """Of CCQ with a backbone that is one recurrence of the keys themselves, or of k̄."""

    def refuses(self, group: Any, request: Request) -> str | None:
        """Why not; None where the kernels do this call."""
        own = wiring(group.program)
        query, backbone = group.program.leaves[0], group.program.leaves[-1]
        if own is None:
            return "its query and its backbone have the same keys, and the query serves no other"
        if query.decay != "none" or not is_plain(backbone):
            return "the query's covariance is of all keys alike, and its backbone one recurrence"
        shapes = dict(request.shapes)
        by_leaf = {leaf_name: shapes[name] for leaf_name, name in own.backbone.items()}
        by_leaf |= {"q": shapes[own.query["q"]], "k": shapes[own.query["k"]]}
        return Recurrence().refuses(backbone, replace(request, shapes=tuple(by_leaf.items())))

    def forward(self, group: Any, x: Tensors, frame: Frame) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output, and q^c."""
        q = x[_wiring(group).query["q"]]
        contracted = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        both = _Both(group, x, frame, contracted)
        both.query.contract(contracted)
        return rows_of_states(read(both.call)), (contracted,)

    def backward(
        self,
        group: Any,
        x: Tensors,
        frame: Frame,
        out: Tensor,
        residuals: tuple[Tensor, ...],
        cotangent: Tensor,
    ) -> dict[str, Tensor]:
        """The gradients of all inputs, in their dtypes."""
        own, (contracted,) = _wiring(group), residuals
        both = _Both(group, x, frame, contracted)
        d_o = queries_of_states(cotangent.to(both.stream.v.dtype), both.call.m)
        d = gradients(both.call, both.stream, d_o, torch.zeros_like(both.state))
        of_backbone = gradients_of(both.leaf, both.inputs, d.stream, frame)
        d_contracted, d_k = of_backbone.pop("q"), of_backbone.pop("k").contiguous()
        more = KeyGradients(unit=d_k) if own.reads_unit_keys else KeyGradients(raw=d_k)
        of_query = both.query.backward(d_contracted, more)
        found = {own.query[name]: gradient for name, gradient in of_query.items()}
        found |= {own.backbone[name]: gradient for name, gradient in of_backbone.items()}
        return {name: gradient.to(x[name].dtype) for name, gradient in found.items()}

    def residual_shapes(self, group: Any, inputs: Mapping[str, ArraySpec]) -> tuple[ArraySpec, ...]:
        """That of q^c."""
        return (inputs[_wiring(group).query["q"]],)


class _Both:
    """A call of both, up to and with the pass that carries states and moments."""

    def __init__(self, group: Any, x: Tensors, frame: Frame, contracted: Tensor) -> None:
        own, first = _wiring(group), group.program.leaves[0]
        self.leaf = group.program.leaves[-1]
        of_query = {leaf_name: x[name] for leaf_name, name in own.query.items()}
        of_backbone = {leaf_name: x[name] for leaf_name, name in own.backbone.items()}
        k, v = of_query["k"], of_backbone["v"]
        shares = k.dtype in SHARING
        chunk = None
        if shares:
            chunk = tokens_of_chunk("chunk_states", k.shape[3], v.shape[3], is_half(k.dtype), k)
        self.query = Conditioned(first.eps, of_query, frame, chunk)
        keys = self.query.unit if own.reads_unit_keys else k
        self.inputs = {**of_backbone, "q": contracted, "k": keys}
        self.stream: Stream = stream_of(self.leaf, self.inputs, frame)
        self.state = self.leaf.zero_state(self.inputs)["state"]
        form = form_of(self.leaf, self.inputs, frame)
        self.call: Call = form.call(self.stream, self.state)
        prepare(self.call, self.stream)
        if shares:
            carry(self.call, self.query.told(own.reads_unit_keys))
        else:
            carry(self.call)
            self.query.carry()


def _wiring(group: Any) -> Wiring:
    own = wiring(group.program)
    assert own is not None  # `refuses` has said so.
    return own
