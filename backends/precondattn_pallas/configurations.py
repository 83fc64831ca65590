"""Tile sizes, warps and stages of every kernel.

A kernel is looked up with the width of its inputs and whether its products have 16-bit factors. The
numbers were chosen to compile for compute capabilities 8.0 and 9.0 without spilling; none has been
measured. Whatever the configuration, a kernel computes the same.

In `configurations.json`, the `columns` of `lucid_inverse` are the length of a super-block. `rows`
is the chunk size of `chunk_states`, and of all other kernels of a recurrence. Kernels for a decay
per channel have tiles of 16 tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from precondattn.kernel_backend.configurations import Configurations


class Configuration(NamedTuple):
    """The tile sizes, warps and stages of a kernel."""

    rows: int
    """Tokens of the tile that a program computes (BLOCK_M of flash attention)."""
    columns: int
    """Tokens of each tile that the program loops over (BLOCK_N)."""
    warps: int = 4
    stages: int = 2


FILE = Path(__file__).with_name("configurations.json")
REGISTRY = Configurations(FILE, Configuration, (16, 32, 64, 128, 256))
forced, configuration = REGISTRY.forced, REGISTRY.find
