"""Tile sizes, warps and stages of every kernel, by architecture.

A kernel is looked up with the width of its inputs and whether its products have 16-bit factors.
Those of an architecture were chosen from its machine code. All other devices, and the interpreter's
tests, use `REGISTRY.untuned`, chosen to compile for compute capability 8.0 and above without
spilling. None is measured. Whatever the configuration, a kernel computes the same.

In `configurations.json`, `rows` is the chunk size of `chunk_states`, of `channel_gates` where
channels have gates, and of all other kernels of such a call. The widths of `laser_exact_*` are
those of keys, and those of `wide_*` of a part of the channels. A wgmma on Hopper multiplies
64 rows by the columns that the tile leaves to a group of four warps: with 16 columns, loading the
rows takes longer than the product.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from precondattn.kernel_backend.configurations import Configurations
from precondattn_triton.target import architecture

if TYPE_CHECKING:
    from torch import Tensor


class Configuration(NamedTuple):
    """The tile sizes, warps and stages of a kernel."""

    rows: int
    """Tokens of the tile that a program computes (BLOCK_M of flash attention)."""
    columns: int
    """Tokens of each tile that the program loops over (BLOCK_N)."""
    warps: int = 4
    stages: int = 2


FILE = Path(__file__).with_name("configurations.json")
REGISTRY = Configurations(FILE, Configuration, (16, 32, 64, 128, 256, 512, 1024))
forced = REGISTRY.forced


def configuration(kernel: str, width: int, half: bool, like: Tensor | None = None) -> Configuration:
    """The configuration of a kernel, at a padded width, on the device of a tensor."""
    return REGISTRY.find(kernel, width, half, architecture(like))
