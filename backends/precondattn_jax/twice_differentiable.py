"""The output of each leaf in operations that JAX can differentiate any number of times.

Memory stays linear in the number of tokens: blocked algorithms run in the loops of `loops.py`, and
a solve is differentiated as a solve (`lower_system.py`). Leaves whose definition is linear in
memory are computed by it, and so are packed calls of leaves that sum over whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import Array

import precondattn as pa
from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.algebra.recurrences import Recurrences, entry_of
from precondattn.frame import Frame
from precondattn.spec.recurrence import Form
from precondattn.spec.softmax import SoftmaxAttention
from precondattn_jax import (
    differentiable_deltaformer,
    differentiable_lucid,
    differentiable_symmetric_lucid,
)
from precondattn_jax.algorithms import ALGORITHMS, STATEFUL, RecurrenceInLoops
from precondattn_jax.arithmetic import JAX
from precondattn_jax.chunkwise import Chunkwise
from precondattn_jax.loops import DIFFERENTIABLE, again
from precondattn_jax.mesa_query import SolvingChunkwise
from precondattn_jax.query_weighted import QueryWeightedView
from precondattn_jax.tiled_attention import TiledAttention
from precondattn_portable.algorithm import AnyAlgorithm
from precondattn_portable.mesa_query import MesaQueryAlgorithm

Inputs = Mapping[str, Array]
Output = Callable[[Any, Inputs, Frame], Array]
"""The output of a leaf, of its inputs in float32 or float64."""


class DifferentiableAttention(TiledAttention):
    loops = DIFFERENTIABLE


class DifferentiableView(QueryWeightedView):
    loops = DIFFERENTIABLE


def _attention(leaf: SoftmaxAttention, x: Inputs, frame: Frame) -> Array:
    return DifferentiableAttention(leaf, x, frame).forward()[0]


def _query_weighted(leaf: pa.QueryWeightedQuery, x: Inputs, frame: Frame) -> Array:
    return DifferentiableView(leaf, x, frame).output()


class DifferentiableChunkwise(Chunkwise):
    body = staticmethod(again)


class DifferentiableSolvingChunkwise(SolvingChunkwise):
    body = staticmethod(again)


class DifferentiableRecurrence(RecurrenceInLoops):
    def in_chunks(self) -> Form:
        return DifferentiableChunkwise()


class DifferentiableMesa(MesaQueryAlgorithm):
    def in_chunks(self) -> Form:
        return DifferentiableSolvingChunkwise()


def _as_computed(algorithm: type[AnyAlgorithm]) -> Output:
    """The output of an algorithm whose operations can all be differentiated."""
    return lambda leaf, x, frame: algorithm(JAX, leaf).forward(dict(x), frame)[0]


def _as_defined(leaf: LeafProtocol, x: Inputs, frame: Frame) -> Array:
    out: Array = jax.checkpoint(lambda x: leaf.forward(x, frame)[0])(dict(x))
    return out


def _unless_packed(algorithm: type[AnyAlgorithm]) -> Output:
    """The output of an algorithm, or of the definition for a packed call, which has a loop."""
    computed = _as_computed(algorithm)

    def output(leaf: LeafProtocol, x: Inputs, frame: Frame) -> Array:
        return (computed if frame.k_segment is None else _as_defined)(leaf, x, frame)

    return output


OUTPUTS: dict[type | Recurrences, Output] = {
    pa.Softmax: _attention,
    pa.Path: _attention,
    pa.LucidSolve: differentiable_lucid.output,
    pa.SymmetricLucidSolve: differentiable_symmetric_lucid.output,
    pa.DeltaFormer: differentiable_deltaformer.output,
    pa.MesaQuery: _as_computed(DifferentiableMesa),
    pa.QueryWeightedQuery: _query_weighted,
    pa.CrossCovariance: _unless_packed(ALGORITHMS[pa.CrossCovariance]),
    pa.Nystrom: _unless_packed(ALGORITHMS[pa.Nystrom]),
    pa.Windowed: _as_computed(ALGORITHMS[pa.Windowed]),
    **dict.fromkeys(STATEFUL, _as_computed(DifferentiableRecurrence)),
}
"""Leaves without an entry are computed as they are defined."""


def output_of(leaf: LeafProtocol) -> Output:
    return entry_of(OUTPUTS, leaf) or _as_defined
