"""The sizes of blocks, by the kind of device that computes them.

A CPU is fast while the arrays of a block fit its caches: blocks are small, and there are thousands
of them. An accelerator is fast on large arrays, and every operation is a launch, which costs the
host some microseconds: its blocks are as large as a part of its memory, and few.

`PRECONDATTN_BLOCKS=accelerator` has a CPU compute with an accelerator's sizes, for tests.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

VARIABLE = "PRECONDATTN_BLOCKS"
"""The environment variable that names the sizes: `cpu` or `accelerator`."""


@dataclass(kw_only=True)
class BlockSizes:
    """The sizes of blocks on one kind of device. Entries are float32: 4 bytes."""

    rows: int
    """Rows of a row block: enough for products at full speed, with little waste at the diagonal."""
    fewest_rows: int
    """Fewest positions of a block, however many query heads share a key head."""
    row_block_entries: int
    """Entries of all row blocks that are processed together."""
    lucid_entries: int
    """Entries of LUCID's row blocks that are processed together, few as their passes are."""
    few_operations: bool
    """Whether fewer operations are worth more arithmetic: triangular systems are solved by the
    library where it has a solver, and what depends on the adjacent chunk is one product."""

    reflections: int
    """Tokens of a chunk of reflections. Longer chunks cost more within a chunk; shorter chunks are
    more numerous, and each costs every preceding key a product."""
    most_chunks: int
    """Approximate maximum number of chunks of reflections in a sequence."""
    chunks_per_row_block: int
    """Chunks of reflections of a row block where it may have several: then each row block, not each
    chunk, costs every preceding key a product, and chunks are half as long."""

    chunk: int
    """Tokens of a recurrence's chunk, a power of two: larger costs more within chunks, smaller more
    between them."""
    chunk_entries: int
    """Entries of an array of the chunks that are computed together. A chunk has ten to twenty
    arrays, of which each pass reads two or three from a core's own cache."""
    token_entries: int
    """Entries of an array of which a function of single tokens reads some tokens at a time."""

    def chunk_of_reflections(self, tokens: int) -> int:
        """Positions of a chunk of reflections. The gradient costs products per pair of chunks."""
        size = self.reflections
        return min(size * max(tokens // (size * self.most_chunks), 1), tokens)

    def chunks_in_row_block(self, tokens: int) -> tuple[int, int]:
        """Positions of a chunk and chunks of a row block, where it may have several."""
        size = min(max(self.reflections // 2, 1), tokens)
        return size, min(self.chunks_per_row_block, -(-tokens // size))


ON_CPU = BlockSizes(
    rows=128,
    fewest_rows=32,
    row_block_entries=2**22,  # 16 MiB
    lucid_entries=2**21,
    few_operations=False,
    reflections=128,
    most_chunks=256,
    chunks_per_row_block=4,
    chunk=64,
    chunk_entries=2**19,
    token_entries=2**19,
)
ON_ACCELERATOR = BlockSizes(
    rows=1024,
    fewest_rows=256,
    row_block_entries=2**29,  # 2 GiB: 1,024 rows of 16 heads and 32,768 keys
    lucid_entries=2**29,
    few_operations=True,
    reflections=1024,
    most_chunks=16,
    chunks_per_row_block=2,
    chunk=128,
    chunk_entries=2**26,  # 256 MiB of each array: 16 heads of width 128 and 32,768 tokens
    token_entries=2**26,
)


def sizes_on(device: str) -> BlockSizes:
    """The sizes on a device, by its kind as a request names it."""
    chosen = os.environ.get(VARIABLE) or ("cpu" if device == "cpu" else "accelerator")
    if chosen not in ("cpu", "accelerator"):
        raise ValueError(f"{VARIABLE} must be cpu or accelerator; found {chosen!r}")
    return ON_CPU if chosen == "cpu" else ON_ACCELERATOR
