"""Tile sizes, warps and stages of every kernel.

A kernel is looked up with the width of its inputs and whether its products have 16-bit factors. The
numbers were chosen to compile for compute capabilities 8.0 and 9.0 without spilling; none has been
measured. Whatever the configuration, a kernel computes the same.
"""

from __future__ import annotations

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


REGISTRY = Configurations[Configuration]((16, 32, 64, 128, 256))
declare, forced, configuration = REGISTRY.declare, REGISTRY.forced, REGISTRY.find

# The `columns` of the inverse are the length of a super-block.
declare(
    "lucid_inverse",
    half={128: Configuration(64, 512, 4, 3), 256: Configuration(64, 512, 4, 1)},
    full={256: Configuration(32, 512, 4, 1)},
)
declare(
    "lucid_update",
    half={128: Configuration(128, 64, 8, 2), 256: Configuration(64, 32, 8, 2)},
    full={
        64: Configuration(64, 32, 4, 1),
        128: Configuration(32, 32, 8, 1),
        256: Configuration(32, 32, 8, 1),
    },
)
declare(
    "lucid_gradient",
    half={128: Configuration(64, 32, 8, 2), 256: Configuration(32, 32, 8, 1)},
    full={
        64: Configuration(32, 32, 4, 1),
        128: Configuration(16, 32, 4, 1),
        256: Configuration(16, 16, 8, 1),
    },
)
declare(
    "attention_forward",
    half={
        64: Configuration(64, 64, 4, 3),
        128: Configuration(128, 32, 8, 3),
        256: Configuration(64, 32, 8, 2),
    },
    full={64: Configuration(64, 32, 8, 2), 128: Configuration(32, 32, 8, 2)},
)
declare(
    "attention_query_gradient",
    half={
        64: Configuration(64, 64, 4, 2),
        128: Configuration(128, 32, 8, 2),
        256: Configuration(32, 32, 8, 2),
    },
    full={64: Configuration(32, 32, 4, 1), 128: Configuration(16, 32, 4, 1)},
)
declare(
    "attention_key_gradient",
    half={
        64: Configuration(128, 32, 8, 2),
        128: Configuration(64, 32, 8, 2),
        256: Configuration(32, 32, 8, 2),
    },
    full={64: Configuration(32, 32, 4, 1), 128: Configuration(16, 16, 8, 1)},
)
declare(
    "window_forward",
    half={128: Configuration(64, 64, 4, 1), 256: Configuration(64, 32, 8, 1)},
    full={64: Configuration(32, 32, 4, 1), 128: Configuration(16, 32, 8, 1)},
)
declare(
    "window_query_gradient",
    half={128: Configuration(64, 32, 4, 1), 256: Configuration(32, 32, 8, 1)},
    full={64: Configuration(32, 32, 8, 1), 128: Configuration(16, 32, 8, 1)},
)
declare(
    "window_key_gradient",
    half={64: Configuration(64, 32, 4, 1), 256: Configuration(32, 32, 8, 1)},
    full={
        32: Configuration(32, 16, 4, 1),
        64: Configuration(32, 32, 8, 1),
        128: Configuration(16, 16, 8, 1),
    },
)
declare(
    "window_table_gradient",
    half={256: Configuration(64, 32, 8, 1)},
    full={64: Configuration(16, 32, 8, 1), 128: Configuration(16, 16, 8, 1)},
)
declare(
    "lucid_decode",
    half={128: Configuration(16, 64, 4, 2), 256: Configuration(16, 32, 4, 2)},
    full={128: Configuration(16, 32, 4, 2), 256: Configuration(16, 32, 8, 1)},
)
# `rows` is the chunk size: the same for all kernels of a recurrence.
declare(
    "chunk_states",
    half={128: Configuration(64, 32, 4, 2), 256: Configuration(64, 32, 8, 1)},
    full={
        64: Configuration(64, 32, 8, 1),
        128: Configuration(32, 16, 4, 1),
        256: Configuration(32, 16, 8, 1),
    },
)
declare(
    "chunk_gradients",
    half={128: Configuration(64, 32, 4, 1), 256: Configuration(64, 32, 8, 1)},
    full={
        64: Configuration(64, 32, 8, 1),
        128: Configuration(32, 16, 4, 1),
        256: Configuration(32, 16, 8, 1),
    },
)
for _kernel in (
    "chunk_inverse",
    "delta_prepare",
    "delta_keys",
    "chunk_reads",
    "chunk_scores_gradient",
    "chunk_query_gradient",
):
    declare(
        _kernel,
        half={256: Configuration(64, 64, 8, 1)},
        full={256: Configuration(64, 32, 8, 1)},
    )
declare(
    "chunk_key_gradient",
    half={256: Configuration(64, 32, 4, 1)},
    full={256: Configuration(64, 32, 8, 1)},
)
# Kernels for a decay per channel, whose tiles have 16 tokens.
declare(
    "channel_delta_keys",
    half={256: Configuration(64, 32, 8, 1)},
    full={256: Configuration(64, 32, 8, 1)},
)
for _kernel in ("channel_states", "channel_gradients"):
    declare(
        _kernel,
        half={128: Configuration(64, 32, 8, 1), 256: Configuration(64, 16, 8, 1)},
        full={256: Configuration(32, 16, 8, 1)},
    )
declare(
    "channel_scores",
    half={256: Configuration(16, 16, 8, 1)},
    full={256: Configuration(16, 16, 4, 1)},
)
for _kernel in ("channel_read", "channel_gradient"):
    declare(
        _kernel,
        half={256: Configuration(16, 64, 8, 1)},
        full={256: Configuration(16, 64, 8, 1)},
    )
