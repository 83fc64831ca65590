"""CCQ's query, alone or together with a backbone that reads the same keys.

    y1 = conditioned_query(q, k, contraction); y2 = l2_norm(x=k); out = gated_delta(q=y1, k=y2, …)

The states of the backbone do not depend on the queries, so one pass over the keys carries both the
states and the moments: a tile of keys, once loaded, is a factor of both (`chunk_states.py`). Keys
are scaled to length 1 once, for both. Nothing else can be shared: the scores within a chunk differ
between q̄ and q^c; only the delta rule needs K Kᵀ; and backward, the gradients of the states are
computed from q^c and W, those of the moments from q̄.

A backbone with a gate per key channel reads q^c in its first launch, so that forward the query has
a separate pass, before it. Backward q^c is known, and the pass is shared: a second tile, of keys
without a decay, is the factor of the moments. When a cache is extended, the passes are separate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from precondattn.algebra.piece import Piece
from precondattn.algebra.program import Program
from precondattn.backend import ArraySpec, Request
from precondattn.frame import Frame
from precondattn.kernel_backend.stateful import gradients_of, is_plain, stream_of
from precondattn.limits import KEPT
from precondattn.spec.conditioned_query import ConditionedQuery
from precondattn.spec.l2_norm import L2Norm
from precondattn.spec.linear_family import LinearFamily, queries_of_states, rows_of_states
from precondattn.spec.recurrence import Stream
from precondattn.spec.stateful import Stateful
from precondattn_triton.ccq.conditioned_query import Conditioned, KeyGradients
from precondattn_triton.precision import is_half
from precondattn_triton.recurrence.chunk_arrays import ChunkCall, tokens_of_chunk
from precondattn_triton.recurrence.chunkwise import (
    RecurrenceKernels,
    carry,
    form_of,
    prepare,
    read_states,
)
from precondattn_triton.recurrence.chunkwise_gradient import gradients

Tensors = Mapping[str, Tensor]

SHARING = (torch.bfloat16,)
"""Dtypes of keys for which one pass computes states and moments. In float32 and float16, products
need three times the factors, and the registers do not hold states and moments at once."""


class RunningCovariance(RecurrenceKernels):
    """CCQ's query of all keys so far: kernels for a full call, the recurrence for a step."""

    def forward(  # type: ignore[override]
        self, leaf: ConditionedQuery, x: Tensors, frame: Frame
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        query = Conditioned(leaf.eps, x, frame)
        query.carry()
        out = torch.empty(x["q"].shape, dtype=x["q"].dtype, device=x["q"].device)
        query.contract(out)
        return out, ()

    def backward(  # type: ignore[override]
        self,
        leaf: ConditionedQuery,
        x: Tensors,
        frame: Frame,
        out: Tensor,
        residuals: tuple[Tensor, ...],
        cotangent: Tensor,
    ) -> dict[str, Tensor]:
        query = Conditioned(leaf.eps, x, frame)
        query.carry()
        d_inputs = query.backward(cotangent)
        return {name: gradient.to(x[name].dtype) for name, gradient in d_inputs.items()}


class ConditionedWiring(NamedTuple):
    """The inputs of the query and of the backbone, under their names in the group."""

    query: dict[str, str]
    """q, k and contraction"""
    backbone: dict[str, str]
    """The backbone's inputs without q, and without k if it reads k̄"""
    reads_unit_keys: bool


@lru_cache(maxsize=KEPT)
def wiring(program: Program) -> ConditionedWiring | None:
    """The input names of query and backbone; None if the backbone's queries are not q^c."""
    query_call, *norms, backbone_call = program.calls
    query = query_call.leaf
    if not isinstance(query, ConditionedQuery):
        return None
    of_query, of_backbone = dict(query_call.arguments), dict(backbone_call.arguments)
    keys = of_query["k"]
    for norm in norms:
        if norm.leaf != L2Norm(query.eps) or dict(norm.arguments) != {"x": keys}:
            return None
        keys = norm.out
    if of_backbone.pop("q") != query_call.out or of_backbone.pop("k") != keys:
        return None
    if query_call.out in of_backbone.values() or keys in of_backbone.values():
        return None
    return ConditionedWiring(of_query, of_backbone | ({} if norms else {"k": keys}), bool(norms))


class ConditionedRead:
    """CCQ with a backbone that is one recurrence of the keys k, or of k̄."""

    def refuses(self, group: Piece, request: Request) -> str | None:
        """The reason why the kernels do not support this call, or None."""
        wires = wiring(group.program)
        query, backbone = group.program.leaves[0], group.program.leaves[-1]
        if wires is None:
            return "query and backbone must read the same keys, and only the backbone may read q^c"
        assert isinstance(query, ConditionedQuery)
        assert isinstance(backbone, Stateful)
        if query.decay != "none" or not is_plain(backbone):
            return "the covariance must have no decay, and the backbone must be one recurrence"
        shapes = dict(request.shapes)
        by_leaf = {leaf_name: shapes[name] for leaf_name, name in wires.backbone.items()}
        by_leaf |= {"q": shapes[wires.query["q"]], "k": shapes[wires.query["k"]]}
        return RecurrenceKernels().refuses(
            backbone, replace(request, shapes=tuple(by_leaf.items()))
        )

    def forward(self, group: Piece, x: Tensors, frame: Frame) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output; the residual is q^c."""
        both = _Both(group, x, frame)
        return rows_of_states(read_states(both.call)), (both.contracted,)

    def backward(
        self,
        group: Piece,
        x: Tensors,
        frame: Frame,
        out: Tensor,
        residuals: tuple[Tensor, ...],
        cotangent: Tensor,
    ) -> dict[str, Tensor]:
        """The gradients of all inputs, in their dtypes."""
        wires, (contracted,) = _wiring(group), residuals
        both = _Both(group, x, frame, contracted, cotangent)
        d = gradients(both.call, both.stream, torch.zeros_like(both.state))
        of_backbone = gradients_of(both.leaf, both.inputs, d.stream, frame)
        d_contracted, d_k = of_backbone.pop("q"), of_backbone.pop("k").contiguous()
        more = KeyGradients(unit=d_k) if wires.reads_unit_keys else KeyGradients(raw=d_k)
        of_query = both.query.backward(d_contracted, more)
        d_inputs = {wires.query[name]: gradient for name, gradient in of_query.items()}
        d_inputs |= {wires.backbone[name]: gradient for name, gradient in of_backbone.items()}
        return {name: gradient.to(x[name].dtype) for name, gradient in d_inputs.items()}

    def residual_shapes(
        self, group: Piece, inputs: Mapping[str, ArraySpec]
    ) -> tuple[ArraySpec, ...]:
        """The shape of q^c."""
        return (inputs[_wiring(group).query["q"]],)


class _Both:
    """A call of query and backbone, with its states and moments computed, and q^c unless given."""

    def __init__(
        self,
        group: Piece,
        x: Tensors,
        frame: Frame,
        contracted: Tensor | None = None,
        cotangent: Tensor | None = None,
    ) -> None:
        wires, query, backbone = _wiring(group), group.program.leaves[0], group.program.leaves[-1]
        assert isinstance(query, ConditionedQuery)
        assert isinstance(backbone, LinearFamily)
        self.leaf = backbone
        of_query = {leaf_name: x[name] for leaf_name, name in wires.query.items()}
        of_backbone = {leaf_name: x[name] for leaf_name, name in wires.backbone.items()}
        q, k, v = of_query["q"], of_query["k"], of_backbone["v"]
        is_given, is_by_channel = contracted is not None, backbone.declares.gate == "channel"
        shares = k.dtype in SHARING and (is_given or not is_by_channel)
        chunk = None
        if shares:
            name = "channel_gates" if is_by_channel else "chunk_states"
            chunk = tokens_of_chunk(name, k.shape[3], v.shape[3], is_half(k.dtype), k)
        self.query = Conditioned(query.eps, of_query, frame, chunk)
        if contracted is None:
            contracted = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.contracted = contracted
        if not shares:
            self.query.carry()
            if not is_given:
                self.query.contract(contracted)
        keys = self.query.unit if wires.reads_unit_keys else k
        self.inputs = {**of_backbone, "q": contracted, "k": keys}
        self.stream: Stream = stream_of(self.leaf, self.inputs, frame)
        self.state = self.leaf.zero_state(self.inputs)["state"]
        form = form_of(self.leaf, self.inputs, frame)
        self.call: ChunkCall = form.call(self.stream, self.state)
        d_o = None
        if cotangent is not None:
            d_o = queries_of_states(cotangent.to(self.stream.v.dtype), self.call.m)
        prepare(self.call, self.stream, d_o)
        has_unit_keys = wires.reads_unit_keys or is_by_channel
        moments = self.query.moments(reads_unit_keys=has_unit_keys) if shares else None
        carry(self.call, moments)
        if shares and not is_given:
            self.query.contract(contracted)


def _wiring(group: Piece) -> ConditionedWiring:
    wires = wiring(group.program)
    assert wires is not None  # `refuses` has checked it.
    return wires
