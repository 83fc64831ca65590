"""Transformers' functions of Kimi Delta Attention: one decay for each token, head and channel."""

from __future__ import annotations

from precondattn.algebra.piece import BackendNames
from precondattn.integrations.transformers.linear.computed import Functions
from precondattn.integrations.transformers.linear.delta_rule import computed_by
from precondattn.spec.kda import KDA

CHUNKS, STEP = "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"
"""The names of Transformers' functions for many tokens and for one."""


def functions(backend: BackendNames) -> Functions:
    """The functions that replace both functions."""
    return computed_by(KDA(), (CHUNKS, STEP), backend)
