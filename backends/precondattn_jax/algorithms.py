"""The table of algorithms, by recurrence or class of leaf."""

from __future__ import annotations

from sys import maxsize

from jax import Array

import precondattn as pa
from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.algebra.recurrences import Recurrences
from precondattn.arrays import Arrays, Index
from precondattn.frame import Frame
from precondattn.spec.recurrence import Form
from precondattn.spec.stateful import Stateful
from precondattn_jax.attention import AttentionBlocks
from precondattn_jax.chunkwise import Chunkwise, SolvingChunkwise
from precondattn_jax.definition import AlgorithmInLoops, InFullPrecision
from precondattn_jax.deltaformer import DeltaFormerBlocks
from precondattn_jax.lucid_solve import LucidSolveBlocks
from precondattn_jax.query_weighted import QueryWeighted
from precondattn_jax.symmetric_lucid import SymmetricLucidSolveBlocks
from precondattn_jax.windowed import WindowedBlocks
from precondattn_portable import outlook
from precondattn_portable.algorithm import TOKEN_WISE, AnyAlgorithm, AsDefined
from precondattn_portable.backend import RECURRENCES
from precondattn_portable.channel import ChannelProducts
from precondattn_portable.cross_covariance import CrossCovarianceProducts
from precondattn_portable.mesa_query import MesaQueryAlgorithm
from precondattn_portable.nystrom import NystromKernels
from precondattn_portable.stateful import StatefulAlgorithm


class RecurrenceInLoops(AlgorithmInLoops[Stateful], StatefulAlgorithm[Stateful]):
    by_pairs = False

    def in_chunks(self) -> Form:
        return Chunkwise(self.loops)


class MesaInLoops(AlgorithmInLoops[pa.MesaQuery], MesaQueryAlgorithm):
    def in_chunks(self) -> Form:
        return SolvingChunkwise(self.loops)


class OfOneSequence(AlgorithmInLoops[LeafProtocol]):
    """Algorithms of leaves that sum over all tokens, for calls that are not packed.

    A packed call would need a loop whose length is known at run time only.
    """

    def output(self, x: Arrays, frame: Frame) -> Array:
        is_packed = frame.k_segment is not None
        return self.output_as_defined(x, frame) if is_packed else super().output(x, frame)


class ChannelInLoops(OfOneSequence, ChannelProducts):
    """Algorithm of `Channel`."""


class CrossCovarianceInLoops(OfOneSequence, CrossCovarianceProducts):
    """Algorithm of `CrossCovariance`."""


class NystromInLoops(OfOneSequence, NystromKernels):
    """Algorithm of `Nystrom`."""


class OutlookInLoops(InFullPrecision[pa.Outlook], outlook.OutlookRows):
    """Algorithm of `Outlook`: all windows are one batch, and the outputs' image is not modified."""

    entries_together = maxsize

    def add(self, image: Array, where: Index, x: Array) -> Array:
        return image.at[where].add(x)


class TokenWiseInLoops(AlgorithmInLoops[LeafProtocol], AsDefined):
    output = AlgorithmInLoops.output_as_defined


ALGORITHMS: dict[type | Recurrences, type[AnyAlgorithm]] = {
    pa.Softmax: AttentionBlocks,
    pa.Path: AttentionBlocks,
    pa.LucidSolve: LucidSolveBlocks,
    pa.SymmetricLucidSolve: SymmetricLucidSolveBlocks,
    pa.DeltaFormer: DeltaFormerBlocks,
    pa.MesaQuery: MesaInLoops,
    pa.QueryWeightedQuery: QueryWeighted,
    pa.Channel: ChannelInLoops,
    pa.CrossCovariance: CrossCovarianceInLoops,
    pa.Nystrom: NystromInLoops,
    pa.Outlook: OutlookInLoops,
    pa.Windowed: WindowedBlocks,
    **dict.fromkeys(RECURRENCES, RecurrenceInLoops),
    **dict.fromkeys((pa.PreconditionedKey, pa.ConditionedQuery), RecurrenceInLoops),
    **dict.fromkeys(TOKEN_WISE, TokenWiseInLoops),
}
"""The algorithm of each leaf. Entries are not inherited from `portable`: this backend supports what
its own algorithms compute. Only the equations of the recurrences' chunks are shared."""
