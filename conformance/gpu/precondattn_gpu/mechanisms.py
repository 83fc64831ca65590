"""The mechanisms that each backend has kernels for."""

from __future__ import annotations

MECHANISMS = {
    "triton": (
        "lucid", "lucid[beta=true]", "laser", "gated_delta", "delta", "path", "gla", "gsa",
        "lucid(laser)", "lucid(path)", "ccq(gated_delta)", "ccq(linear)", "differential",
        "row_normalized", "laser(softmax[causal=false])", "path[flush=64]", "linear", "retention",
        "ssd",
    ),
    "pallas": (
        "lucid", "lucid[beta=true]", "softmax", "laser", "gated_delta", "delta", "gla", "gsa",
        "ccq(gated_delta)", "linear", "retention", "ssd",
    ),
    "cupy": (
        "lucid", "lucid[beta=true]", "softmax", "laser", "lucid(laser)", "gated_delta", "delta",
        "ccq(gated_delta)", "row_normalized", "linear", "retention", "ssd",
    ),
}  # fmt: skip
"""The most used first."""


def in_turns() -> list[tuple[str, str]]:
    """(backend, mechanism): the first of each backend, then the second of each, and so on."""
    longest = max(map(len, MECHANISMS.values()))
    return [
        (backend, names[i])
        for i in range(longest)
        for backend, names in MECHANISMS.items()
        if i < len(names)
    ]
