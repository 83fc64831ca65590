"""Which algorithm computes which leaf."""

from __future__ import annotations

from typing import Any

import precondattn as pa
from precondattn_jax.attention import Attention
from precondattn_jax.chunkwise import Chunkwise
from precondattn_jax.lucid_solve import LucidSolve
from precondattn_jax.query_weighted import QueryWeighted
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.backend import STATEFUL
from precondattn_portable.stateful import StatefulAlgorithm
from precondattn_portable.token_wise import AsDefined

ALGORITHMS: dict[type, Algorithm] = {
    pa.Softmax: Attention(),
    pa.Path: Attention(),
    pa.LucidSolve: LucidSolve(),
    pa.QueryWeightedQuery: QueryWeighted(),
    **dict.fromkeys(STATEFUL, StatefulAlgorithm(lambda ops: Chunkwise())),
}
"""By the leaf's own class: a subclass may mean something else."""


def algorithm_of(leaf: Any) -> Algorithm | None:
    found = ALGORITHMS.get(type(leaf))
    return AsDefined() if found is None and isinstance(leaf, pa.TokenWise) else found
