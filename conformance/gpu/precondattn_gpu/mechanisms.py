"""The mechanisms that each backend has kernels for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

MECHANISMS = {
    "triton": (
        "lucid", "lucid[beta=true]", "laser", "gated_delta", "delta", "path", "gla", "gsa",
        "lucid(laser)", "lucid(path)", "ccq(gated_delta)", "ccq(linear)", "differential",
        "row_normalized", "laser(softmax[causal=false])", "path[flush=64]", "linear", "retention",
        "ssd", "kda",
    ),
    "pallas": (
        "lucid", "lucid[beta=true]", "softmax", "laser", "gated_delta", "delta", "gla", "gsa",
        "ccq(gated_delta)", "linear", "retention", "ssd", "kda",
    ),
    "cupy": (
        "lucid", "lucid[beta=true]", "softmax", "laser", "lucid(laser)", "gated_delta", "delta",
        "ccq(gated_delta)", "row_normalized", "linear", "retention", "ssd",
    ),
}  # fmt: skip
"""The most used first."""


def in_turns() -> list[tuple[str, str]]:
    """(backend, mechanism): the first of each backend, then the second of each, and so on."""
    return interleaved(
        [[(backend, name) for name in names] for backend, names in MECHANISMS.items()]
    )


def interleaved(lists: Sequence[Sequence[T]]) -> list[T]:
    """The first of each list, then the second of each, and so on, until the longest ends."""
    longest = max(map(len, lists))
    return [each[i] for i in range(longest) for each in lists if i < len(each)]
