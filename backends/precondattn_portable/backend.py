"""The portable backend: which leaves are computed by which algorithm.

A step of LUCID is claimed as a group, because computing its leaves together is cheaper
(`fused.py`); other leaves are computed one at a time. Subclasses serve another library with the
same or better algorithms.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import cast

import precondattn as pa
from precondattn.algebra.group import Group
from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.algebra.piece import Piece
from precondattn.algebra.recurrences import Recurrences, entry_of, lack_of
from precondattn.arrays import Array, Residuals
from precondattn.backend import ArraySpec, Backend, Request, Runner
from precondattn.frame import Frame
from precondattn.preconditioners.lucid import is_lucid
from precondattn.runner import LeafRunner
from precondattn.spec.read import MEAN
from precondattn_portable.algorithm import TOKEN_WISE, AnyAlgorithm
from precondattn_portable.arithmetic import BY_LIBRARY, Arithmetic
from precondattn_portable.sizes import sizes_on

RECURRENCES = (
    Recurrences(
        gate=(None, "fixed", "head", "channel"),
        keys=("given", "of the gate"),
        reads=("after", "before, with a bonus"),
        normaliser=(None, "sum", "running maximum"),
    ),
    Recurrences(
        ("delta", "low rank"),
        gate=(None, "fixed", "head", "channel"),
        erase=("written key", "own key", "own key, before the decay"),
        strength=(None, "scalar", "channel"),
        several_steps=True,
    ),
    Recurrences(("slots",), gate=("slot",)),
)
"""The recurrences that are computed in chunks of tokens."""

Algorithms = Mapping[type | Recurrences, str]
"""`"module:Class"` of the algorithm of a leaf, which is imported when it is needed."""

ALGORITHMS: Algorithms = {
    pa.Softmax: "precondattn_portable.attention:AttentionBlocks",
    pa.Path: "precondattn_portable.attention:AttentionBlocks",
    pa.LucidSolve: "precondattn_portable.lucid_solve:LucidSolveBlocks",
    pa.SymmetricLucidSolve: "precondattn_portable.symmetric_lucid:SymmetricLucidSolveBlocks",
    pa.DeltaFormer: "precondattn_portable.deltaformer:DeltaFormerBlocks",
    pa.PreconditionedKey: "precondattn_portable.preconditioned_key:PreconditionedKeyChunks",
    pa.ConditionedQuery: "precondattn_portable.conditioned_query:ConditionedQueryAlgorithm",
    pa.MesaQuery: "precondattn_portable.mesa_query:MesaQueryAlgorithm",
    pa.QueryWeightedQuery: "precondattn_portable.query_weighted:QueryWeighted",
    pa.Channel: "precondattn_portable.channel:ChannelProducts",
    pa.CrossCovariance: "precondattn_portable.cross_covariance:CrossCovarianceProducts",
    pa.Nystrom: "precondattn_portable.nystrom:NystromKernels",
    pa.Outlook: "precondattn_portable.outlook:OutlookRows",
    pa.Windowed: "precondattn_portable.windowed:WindowedBlocks",
    **dict.fromkeys(RECURRENCES, "precondattn_portable.stateful:StatefulAlgorithm"),
    **dict.fromkeys(TOKEN_WISE, "precondattn_portable.algorithm:AsDefined"),
}
"""A leaf without an entry is declined, and runs on the reference."""


@cache
def algorithm_at(place: str) -> type[AnyAlgorithm]:
    """The class of an algorithm, by its place `"module:Class"`."""
    module, _, name = place.partition(":")
    algorithm: type[AnyAlgorithm] = getattr(import_module(module), name)
    return algorithm


class Portable(Backend):
    """Blocked algorithms, linear in memory, for array-API libraries without another backend.

    For inputs in half precision, outputs are float32, as the reference's are: the gradient and the
    next piece read them unrounded, and the core rounds the last one.
    """

    name = "portable"
    libraries = frozenset({"numpy", "cupy", "array_api_strict"})
    preference = 10
    wide_values = True
    segments_as_batch = True
    masks_pairs = True
    covers = frozenset(
        ("softmax", "lucid", "laser", "path", "gated_delta", "gsa", "ccq(gated_delta)")
    )
    memory = "linear"

    algorithms: Algorithms = ALGORITHMS

    def algorithm_class(self, leaf: Piece | LeafProtocol) -> type[AnyAlgorithm] | None:
        """The class that computes a leaf; None if this backend has none."""
        place = entry_of(self.algorithms, cast("LeafProtocol", leaf))
        return None if place is None else algorithm_at(place)

    def algorithm(self, leaf: Piece | LeafProtocol, library: str, device: str) -> AnyAlgorithm:
        """The algorithm of a leaf that `refusal` has not declined."""
        algorithm_class = self.algorithm_class(leaf)
        assert algorithm_class is not None
        return algorithm_class(self.arithmetic(library, device), leaf)

    def arithmetic(self, library: str, device: str) -> Arithmetic:
        """The operations of a library, with the sizes of blocks on a device."""
        return BY_LIBRARY.get(library, Arithmetic)(sizes_on(device))

    def prepare(self, piece: Piece, request: Request) -> Runner | str:
        reason = self.refusal(piece, request)
        return self.runner(piece, request.library, request.device) if reason is None else reason

    def refusal(self, piece: Piece, request: Request) -> str | None:
        """The reason why the backend does not support a request; None if it does."""
        if len(piece.program.calls) > 1:
            is_step = is_lucid(piece.program) and request.verb == "extend"
            return None if is_step else "runs the leaves of this group one by one"
        if self.algorithm_class(piece) is None:
            (leaf,) = piece.program.leaves
            return f"has no algorithm for {leaf.name}{lack_of(self.algorithms, leaf)}"
        return None

    def runner(self, piece: Piece, library: str, device: str) -> AlgorithmRunner:
        """The runner of a leaf or group that `refusal` has not declined."""
        if is_lucid(piece.program):
            from precondattn_portable.fused import LucidStep

            attention = self.algorithm(piece.program.leaves[1], library, device)
            ops, group = self.arithmetic(library, device), cast("Group", piece)
            algorithm: AnyAlgorithm = LucidStep(ops, group, attention)
        else:
            algorithm = self.algorithm(piece, library, device)
        return self.runner_class(piece)(piece, algorithm, algorithm=algorithm.name)

    def runner_class(self, piece: Piece) -> type[AlgorithmRunner]:
        """The kind of runner of a piece."""
        return AlgorithmRunner


class AlgorithmRunner(LeafRunner):
    """A runner that calls an algorithm, its `methods`."""

    def residuals_from_lse(self, lse: Array) -> Residuals | None:
        # LASER's gradient divides by the output of these keys alone, which may underflow.
        is_mean = type(self.piece) is pa.Softmax and self.piece.read == MEAN
        return (lse,) if is_mean else None

    def residual_shapes(
        self, inputs: Mapping[str, ArraySpec], frame: Frame
    ) -> tuple[ArraySpec, ...]:
        shapes: tuple[ArraySpec, ...] = self.methods.residual_shapes(inputs)
        return shapes
