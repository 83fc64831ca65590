"""Transformers' functions of Kimi Delta Attention: one decay for each token, head and channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precondattn.integrations.transformers.linear.delta_rule import computed_by
from precondattn.spec.kda import KDA

CHUNKS, STEP = "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"
"""The names of Transformers' functions for many tokens and for one."""


def functions(backend: Any) -> dict[str, Callable[..., Any]]:
    """What to call in place of both functions."""
    return computed_by(KDA(), (CHUNKS, STEP), backend)
