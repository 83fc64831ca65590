"""The PyTorch backend: which leaves are computed by which algorithm.

They are the algorithms of `precondattn_portable` with PyTorch's products, and PyTorch's own
attention where it supports the call, which PyTorch's autograd differentiates.
"""

from __future__ import annotations

from typing import cast

import precondattn as pa
from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.algebra.piece import Piece
from precondattn.algebra.recurrences import Recurrences, key_of
from precondattn.backend import Request, Runner
from precondattn.spec.read import MEAN
from precondattn_portable.algorithm import TOKEN_WISE, AnyAlgorithm
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.backend import (
    ALGORITHMS,
    RECURRENCES,
    AlgorithmRunner,
    Algorithms,
    Portable,
    algorithm_at,
)
from precondattn_portable.sizes import sizes_on

UNGATED = Recurrences(gate=(None, "fixed"), normaliser=(None, "sum"))
GATED_BY_HEAD = Recurrences(gate=("head",))
GATED_BY_CHANNEL = Recurrences(gate=("channel",), reads=("after", "before, with a bonus"))
CORRECTED = Recurrences(("delta",), gate=(None, "head", "channel"), strength=("scalar",))

IN_PLACE = "precondattn_torch.one_token:InPlaceToken"
WHOLE = (*TOKEN_WISE, pa.PreconditionedKey, UNGATED, GATED_BY_HEAD)
"""Leaves that are not divided by heads: their results are most of the memory, and joining them
costs as much as the division saves."""


class Torch(Portable):
    """Blocked algorithms and scaled-dot-product attention, on any device."""

    name = "torch"
    libraries = frozenset({"torch"})
    preference = 10

    def arithmetic(self, library: str, device: str) -> Arithmetic:
        from precondattn_torch.arithmetic import TorchArithmetic

        return TorchArithmetic(sizes_on(device))

    algorithms: Algorithms = {  # noqa: RUF012  No one writes to it.
        UNGATED: ALGORITHMS[RECURRENCES[0]],
        GATED_BY_HEAD: IN_PLACE,
        GATED_BY_CHANNEL: IN_PLACE,
        CORRECTED: IN_PLACE,
        **ALGORITHMS,
        pa.Softmax: "precondattn_torch.tiled_attention:TiledKernelAttention",
        pa.Path: "precondattn_torch.path:PathAttention",
    }

    def algorithm(self, leaf: Piece | LeafProtocol, library: str, device: str) -> AnyAlgorithm:
        if type(leaf) is pa.Path and leaf.read != MEAN:
            return algorithm_at(ALGORITHMS[pa.Path])(self.arithmetic(library, device), leaf)
        algorithm = super().algorithm(leaf, library, device)
        if key_of(self.algorithms, cast("LeafProtocol", leaf)) in (pa.Softmax, *WHOLE):
            return algorithm
        from precondattn_torch.by_heads import ByHeads

        return ByHeads(algorithm) if device == "cpu" else algorithm

    def _is_differentiable(self, leaf: Piece, request: Request) -> bool:
        """Whether a call consists of PyTorch's own differentiable operations."""
        if type(leaf) in TOKEN_WISE:
            return True
        if type(leaf) is not pa.Softmax or request.mapped:
            return False
        from precondattn_torch.scaled_dot_product import fits, needs_sums

        is_full = request.verb in ("forward", "vjp") and not needs_sums(leaf)
        return is_full and fits(leaf, dict(request.shapes), request.masks, request.device)

    def prepare(self, piece: Piece, request: Request) -> Runner | str:
        answer = super().prepare(piece, request)
        if isinstance(answer, str) or not self._is_differentiable(piece, request):
            return answer
        from precondattn_torch.runners import AttentionRunner, FusedRunner

        answer.differentiable = True
        if isinstance(answer, AttentionRunner) and not request.is_operator:
            return FusedRunner(answer, request)
        return answer

    def runner_class(self, piece: Piece) -> type[AlgorithmRunner]:
        from precondattn_torch import runners

        if type(piece) in TOKEN_WISE:
            return runners.RecordedRunner
        is_softmax = type(piece) is pa.Softmax
        return runners.AttentionRunner if is_softmax else runners.UnrecordedRunner
