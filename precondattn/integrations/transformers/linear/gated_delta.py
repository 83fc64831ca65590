"""Transformers' functions of the gated delta rule: one decay for each token and head."""

from __future__ import annotations

from precondattn.algebra.piece import BackendNames
from precondattn.integrations.transformers.linear.computed import Functions
from precondattn.integrations.transformers.linear.delta_rule import computed_by
from precondattn.spec.delta import GatedDelta

CHUNKS, STEP = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
"""The names of Transformers' functions for many tokens and for one."""


def functions(backend: BackendNames) -> Functions:
    """The functions that replace both functions."""
    return computed_by(GatedDelta(), (CHUNKS, STEP), backend)
