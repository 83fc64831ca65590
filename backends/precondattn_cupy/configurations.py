"""The tile sizes of every kernel. Whatever the tiles, a kernel computes the same.

A kernel is looked up with the larger of its padded widths of keys and values, and whether its
products have 16-bit factors. The numbers were chosen to compile for compute capability 8.0 and
above without spills up to 128 channels; none has been measured.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

from precondattn.kernel_backend import limits
from precondattn.kernel_backend.configurations import Configurations

WIDTHS = (16, 32, 64, 128, 256, 512)
"""The widths of tiles: an array of another width is padded with zeros."""


class Configuration(NamedTuple):
    """The tile sizes of a kernel."""

    rows: int
    """Tokens of the tile that a block computes (BLOCK_M of flash attention): 16 for each warp."""
    columns: int = 16
    """Tokens of each tile that the block loops over (BLOCK_N)."""

    @property
    def threads(self) -> int:
        return 2 * self.rows


FILE = Path(__file__).with_name("configurations.json")
REGISTRY = Configurations(FILE, Configuration, WIDTHS)
forced, configuration = REGISTRY.forced, REGISTRY.find
padded_width = partial(limits.padded_width, widest=WIDTHS[-1])
