"""The table of algorithms, by recurrence or class of leaf."""

from __future__ import annotations

import precondattn as pa
from precondattn.algebra.recurrences import Recurrences
from precondattn.spec.recurrence import Form
from precondattn.spec.stateful import Stateful
from precondattn_jax.attention import AttentionBlocks
from precondattn_jax.chunkwise import Chunkwise
from precondattn_jax.deltaformer import DeltaFormerBlocks
from precondattn_jax.lucid_solve import LucidSolveBlocks
from precondattn_jax.mesa_query import SolvingChunkwise
from precondattn_jax.query_weighted import QueryWeighted
from precondattn_jax.symmetric_lucid import SymmetricLucidSolveBlocks
from precondattn_jax.windowed import WindowedBlocks
from precondattn_portable.algorithm import AnyAlgorithm
from precondattn_portable.cross_covariance import CrossCovarianceProducts
from precondattn_portable.mesa_query import MesaQueryAlgorithm
from precondattn_portable.nystrom import NystromKernels
from precondattn_portable.stateful import StatefulAlgorithm
from precondattn_portable.token_wise import TOKEN_WISE, AsDefined

STATEFUL = (
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
    pa.PreconditionedKey,
    pa.ConditionedQuery,
)
"""What is computed in chunks of tokens."""


class RecurrenceInLoops(StatefulAlgorithm[Stateful]):
    by_pairs = False

    def in_chunks(self) -> Form:
        return Chunkwise()


class MesaInLoops(MesaQueryAlgorithm):
    def in_chunks(self) -> Form:
        return SolvingChunkwise()


ALGORITHMS: dict[type | Recurrences, type[AnyAlgorithm]] = {
    pa.Softmax: AttentionBlocks,
    pa.Path: AttentionBlocks,
    pa.LucidSolve: LucidSolveBlocks,
    pa.SymmetricLucidSolve: SymmetricLucidSolveBlocks,
    pa.DeltaFormer: DeltaFormerBlocks,
    pa.MesaQuery: MesaInLoops,
    pa.QueryWeightedQuery: QueryWeighted,
    pa.CrossCovariance: CrossCovarianceProducts,
    pa.Nystrom: NystromKernels,
    pa.Windowed: WindowedBlocks,
    **dict.fromkeys(STATEFUL, RecurrenceInLoops),
    **dict.fromkeys(TOKEN_WISE, AsDefined),
}
"""The table is not derived from that of `portable`: what this backend claims, its own algorithms
compute."""
