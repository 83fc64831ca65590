"""The table of algorithms, by class of leaf."""

from __future__ import annotations

from typing import Any

import precondattn as pa
from precondattn_jax.attention import AttentionBlocks
from precondattn_jax.chunkwise import Chunkwise
from precondattn_jax.deltaformer import DeltaFormerBlocks
from precondattn_jax.lucid_solve import LucidSolveBlocks
from precondattn_jax.mesa_query import SolvingChunkwise
from precondattn_jax.query_weighted import QueryWeighted
from precondattn_jax.symmetric_lucid import SymmetricLucidSolveBlocks
from precondattn_jax.windowed import WindowedBlocks
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.cross_covariance import CrossCovarianceProducts
from precondattn_portable.mesa_query import MesaQueryAlgorithm
from precondattn_portable.nystrom import NystromKernels
from precondattn_portable.stateful import StatefulAlgorithm
from precondattn_portable.token_wise import AsDefined

STATEFUL = (
    pa.Linear,
    pa.Retention,
    pa.SSD,
    pa.GLA,
    pa.RWKV6,
    pa.Delta,
    pa.GatedDelta,
    pa.KDA,
    pa.GDN2,
    pa.Comba,
    pa.DeltaProduct,
    pa.DPLR,
    pa.ErasingDelta,
    pa.ErasingGatedDelta,
    pa.ErasingKDA,
    pa.ErasingGDN2,
    pa.PreconditionedKey,
    pa.GSA,
    pa.MLSTM,
    pa.ConditionedQuery,
)

TOKEN_WISE = (
    pa.ContractionGate,
    pa.Difference,
    pa.EluPlusOne,
    pa.HedgehogMap,
    pa.L2Norm,
    pa.LayerNorm,
    pa.RMSNorm,
    pa.ScaledDims,
    pa.StableBeta,
    pa.StableChannels,
    pa.Tempered,
    pa.UnitRows,
)
"""Leaves whose definition can be compiled: its control flow does not depend on array entries."""

ALGORITHMS: dict[type, Algorithm] = {
    pa.Softmax: AttentionBlocks(),
    pa.Path: AttentionBlocks(),
    pa.LucidSolve: LucidSolveBlocks(),
    pa.SymmetricLucidSolve: SymmetricLucidSolveBlocks(),
    pa.DeltaFormer: DeltaFormerBlocks(),
    pa.MesaQuery: MesaQueryAlgorithm(lambda ops: SolvingChunkwise()),
    pa.QueryWeightedQuery: QueryWeighted(),
    pa.CrossCovariance: CrossCovarianceProducts(),
    pa.Nystrom: NystromKernels(),
    pa.Windowed: WindowedBlocks(),
    **dict.fromkeys(STATEFUL, StatefulAlgorithm(lambda ops: Chunkwise(), by_pairs=False)),
    **dict.fromkeys(TOKEN_WISE, AsDefined()),
}
"""By the leaf's exact class: a subclass may define other mathematics. The table is not derived from
that of `portable`: what this backend claims, its own algorithms compute."""


def algorithm_of(leaf: Any) -> Algorithm | None:
    return ALGORITHMS.get(type(leaf))
