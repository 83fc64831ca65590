"""The mechanisms that each backend has kernels for."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TypeVar

from precondattn.kernel_backend.kernel_table import KernelTable, recurrences_in

T = TypeVar("T")

MECHANISMS = {
    "triton": (
        "lucid", "lucid[beta=true]", "laser", "gated_delta", "delta", "path", "gla", "gsa",
        "lucid(laser)", "lucid(path)", "ccq(gated_delta)", "ccq(linear)", "differential",
        "row_normalized", "laser(softmax[causal=false])", "path[flush=64]", "linear", "retention",
        "ssd", "kda", "softmax[window=64]", "softmax[window=64,softcap=30]", "softmax[bias=true]",
        "softmax[window=64,sink=true]", "softmax[distance=slopes]",
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
"""The most used mechanisms, chosen by hand, most used first. `mechanisms_of` appends all other
recurrences that a backend has kernels for."""


def kernels(backend: str) -> KernelTable:
    """The mechanisms that a backend computes on an NVIDIA GPU."""
    tables = import_module(f"precondattn_{backend}.backend").KERNELS
    table: KernelTable = tables.get("cuda", tables)
    return table


def mechanisms_of(backend: str) -> list[str]:
    """The mechanisms to run on a backend, the most used first."""
    bases = [leaf.name for leaf in recurrences_in(kernels(backend)) if leaf.role == "base"]
    return list(dict.fromkeys([*MECHANISMS[backend], *bases]))


def in_turns() -> list[tuple[str, str]]:
    """Pairs (backend, mechanism): the first of each backend, then the second of each, and so on."""
    return interleaved(
        [[(backend, name) for name in mechanisms_of(backend)] for backend in MECHANISMS]
    )


def interleaved(lists: Sequence[Sequence[T]]) -> list[T]:
    """The first of each list, then the second of each, and so on, until the longest ends."""
    longest = max(map(len, lists))
    return [each[i] for i in range(longest) for each in lists if i < len(each)]
