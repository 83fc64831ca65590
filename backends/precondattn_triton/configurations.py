"""Tile sizes, warps and stages of every kernel, by architecture.

A kernel is looked up with the width of its inputs and whether its products have 16-bit factors.
Those declared for an architecture were chosen from its machine code. All other devices, and the
interpreter's tests, use `REGISTRY.untuned`, chosen to compile for compute capability 8.0 and above
without spilling. None is measured. Whatever the configuration, a kernel computes the same.
"""

from __future__ import annotations

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


REGISTRY = Configurations[Configuration]((16, 32, 64, 128, 256, 512, 1024))
declare, forced = REGISTRY.declare, REGISTRY.forced


def configuration(kernel: str, width: int, half: bool, like: Tensor | None = None) -> Configuration:
    """The configuration of a kernel, at a padded width, on the device of a tensor."""
    return REGISTRY.find(kernel, width, half, architecture(like))


declare(
    "lucid_inverse",
    half={128: Configuration(64, 1024, 4, 3), 256: Configuration(64, 1024, 4, 1)},
    full={256: Configuration(32, 1024, 4, 1)},
)
declare(
    "lucid_update",
    half={128: Configuration(64, 64, 8, 2), 256: Configuration(64, 32, 8, 2)},
    full={
        64: Configuration(64, 32, 4, 1),
        128: Configuration(32, 16, 8, 1),
        256: Configuration(32, 16, 8, 1),
    },
)
declare(
    "lucid_update_with_sums",
    half={
        64: Configuration(64, 32, 8, 2),
        128: Configuration(64, 64, 8, 2),
        256: Configuration(64, 32, 8, 2),
    },
    full={64: Configuration(32, 32, 4, 1), 256: Configuration(16, 32, 8, 1)},
)
declare(
    "lucid_gradient",
    half={
        128: Configuration(64, 32, 8, 2),
        256: Configuration(32, 32, 8, 1),
    },
    full={
        64: Configuration(32, 32, 4, 2),
        128: Configuration(16, 32, 8, 1),
        256: Configuration(16, 16, 8, 1),
    },
)
declare(
    "lucid_decode",
    half={128: Configuration(16, 64, 4, 2), 256: Configuration(16, 32, 4, 2)},
    full={128: Configuration(16, 32, 4, 2), 256: Configuration(16, 32, 8, 1)},
)
declare("unit_rows", half={512: Configuration(8, 0, 4)}, full={512: Configuration(8, 0, 4)})
declare(
    "laser_forward",
    half={
        64: Configuration(128, 64, 4, 3),
        128: Configuration(128, 64, 8, 3),
        512: Configuration(32, 32, 8, 2),
    },
    full={
        64: Configuration(64, 32, 8, 2),
        128: Configuration(32, 32, 8, 2),
        256: Configuration(16, 32, 8, 1),
    },
)
# The widths of these are those of keys.
declare(
    "laser_exact_forward",
    half={
        128: Configuration(32, 1, 8, 1),
        256: Configuration(16, 1, 4, 1),
        1024: Configuration(4, 1, 4, 1),
    },
    full={
        128: Configuration(32, 1, 8, 1),
        256: Configuration(16, 1, 4, 1),
        1024: Configuration(4, 1, 4, 1),
    },
)
declare(
    "laser_decode",
    half={128: Configuration(0, 32, 4, 2), 256: Configuration(0, 32, 8, 1)},
    full={128: Configuration(0, 32, 4, 1), 256: Configuration(0, 32, 8, 1)},
)
declare(
    "laser_query_gradient",
    half={
        64: Configuration(64, 64, 4, 2),
        128: Configuration(128, 32, 8, 2),
        256: Configuration(32, 32, 8, 2),
        512: Configuration(32, 32, 8, 1),
    },
    full={
        64: Configuration(32, 32, 4, 1),
        128: Configuration(16, 32, 8, 1),
        512: Configuration(16, 16, 8, 1),
    },
)
declare(
    "laser_key_gradient",
    half={
        64: Configuration(128, 32, 8, 2),
        128: Configuration(64, 32, 8, 2),
        256: Configuration(32, 32, 8, 2),
        512: Configuration(16, 16, 8, 2),
    },
    full={
        64: Configuration(32, 32, 4, 1),
        128: Configuration(16, 16, 4, 1),
        512: Configuration(16, 16, 8, 1),
    },
)
declare(
    "laser_exact_query_gradient",
    half={
        256: Configuration(16, 1, 4, 1),
        1024: Configuration(4, 1, 4, 1),
    },
    full={
        256: Configuration(16, 1, 4, 1),
        1024: Configuration(4, 1, 4, 1),
    },
)
declare(
    "laser_exact_key_gradient",
    half={
        256: Configuration(16, 1, 4, 1),
        1024: Configuration(4, 1, 4, 1),
    },
    full={
        256: Configuration(16, 1, 4, 1),
        1024: Configuration(4, 1, 4, 1),
    },
)
declare(
    "laser_exact_bias_gradient",
    half={1024: Configuration(16, 32, 8, 1)},
    full={1024: Configuration(16, 32, 8, 1)},
)
# The widths of these are those of a part of the channels.
declare(
    "wide_forward",
    half={256: Configuration(64, 32, 8, 2)},
    full={128: Configuration(32, 32, 8, 1)},
)
declare(
    "wide_query_gradient",
    half={256: Configuration(64, 32, 8, 2)},
    full={128: Configuration(32, 16, 8, 1)},
)
declare(
    "wide_bias_gradient",
    half={256: Configuration(16, 32, 8, 1)},
    full={128: Configuration(16, 32, 8, 1)},
)
declare(
    "wide_key_gradient",
    half={256: Configuration(32, 32, 8, 2)},
    full={128: Configuration(32, 16, 8, 1)},
)
declare(
    "path_chunks",
    half={256: Configuration(32, 64, 4, 1)},
    full={256: Configuration(16, 32, 4, 1)},
)
declare(
    "path_blocks",
    half={128: Configuration(0, 64, 8, 1)},
    full={64: Configuration(0, 16, 8, 1), 128: Configuration(0, 32, 8, 1)},
)
declare(
    "path_chunk_gradient",
    half={128: Configuration(0, 64, 8, 1), 256: Configuration(0, 32, 8, 1)},
    full={128: Configuration(0, 16, 4, 1), 256: Configuration(0, 32, 8, 1)},
)
declare(
    "path_forward",
    half={
        64: Configuration(64, 64, 4, 2),
        128: Configuration(64, 64, 8, 2),
        256: Configuration(32, 32, 8, 1),
        512: Configuration(32, 32, 8, 1),
    },
    full={
        64: Configuration(32, 16, 8, 1),
        128: Configuration(16, 16, 8, 1),
        512: Configuration(16, 16, 16, 1),
    },
)
declare(
    "path_carry",
    half={512: Configuration(64, 0, 8, 1)},
    full={128: Configuration(16, 0, 8, 1), 512: Configuration(16, 0, 4, 1)},
)
declare(
    "path_query_gradient",
    half={64: Configuration(64, 0, 8, 1), 512: Configuration(32, 0, 8, 1)},
    full={128: Configuration(16, 0, 8, 1), 512: Configuration(16, 0, 16, 1)},
)
declare(
    "path_block_query_gradient",
    half={128: Configuration(64, 32, 8, 1), 512: Configuration(32, 32, 8, 1)},
    full={128: Configuration(16, 32, 8, 1), 512: Configuration(16, 16, 8, 1)},
)
declare(
    "path_key_gradient",
    half={
        64: Configuration(32, 32, 8, 1),
        128: Configuration(32, 32, 4, 1),
        512: Configuration(32, 32, 8, 1),
    },
    full={512: Configuration(16, 16, 8, 1)},
)
declare(
    "path_block_key_gradient",
    half={128: Configuration(64, 32, 8, 1), 512: Configuration(32, 32, 8, 1)},
    full={512: Configuration(16, 16, 8, 1)},
)
declare(
    "path_reflections",
    half={256: Configuration(0, 32, 8, 1)},
    full={256: Configuration(0, 16, 8, 1)},
)
declare(
    "path_within_chunk",
    half={512: Configuration(32, 32, 4, 1)},
    full={512: Configuration(16, 32, 4, 1)},
)
declare(
    "path_gather",
    half={512: Configuration(32, 32, 4, 1)},
    full={512: Configuration(16, 32, 4, 1)},
)
declare(
    "path_decode",
    half={256: Configuration(0, 32, 4, 2)},
    full={128: Configuration(0, 32, 4, 2), 256: Configuration(0, 32, 8, 1)},
)
declare(
    "differential_decode",
    half={128: Configuration(0, 64, 8, 2), 256: Configuration(0, 32, 8, 2)},
    full={128: Configuration(0, 32, 8, 2), 256: Configuration(0, 16, 8, 2)},
)
declare(
    "softmax_forward",
    half={128: Configuration(128, 64, 8, 2), 512: Configuration(64, 32, 8, 2)},
    full={
        128: Configuration(32, 32, 8, 2),
        256: Configuration(16, 32, 8, 1),
    },
)
declare(
    "softmax_query_gradient",
    half={128: Configuration(64, 64, 8, 2), 512: Configuration(32, 32, 8, 1)},
    full={
        64: Configuration(32, 32, 4, 1),
        128: Configuration(16, 32, 8, 1),
        256: Configuration(16, 16, 8, 1),
    },
)
declare(
    "softmax_key_gradient",
    half={128: Configuration(64, 32, 8, 1), 512: Configuration(16, 16, 8, 2)},
    full={
        64: Configuration(32, 32, 8, 1),
        128: Configuration(16, 16, 4, 1),
        256: Configuration(16, 16, 8, 1),
    },
)
declare(
    "softmax_bias_gradient",
    half={128: Configuration(32, 32, 8, 1), 512: Configuration(32, 16, 8, 1)},
    full={64: Configuration(32, 32, 8, 1), 256: Configuration(16, 16, 8, 1)},
)

# `rows` is the chunk size: the same for all kernels of a recurrence, and for those of CCQ's query.
declare(
    "chunk_states",
    half={256: Configuration(64, 32, 8, 1), 512: Configuration(64, 16, 8, 1)},
    full={128: Configuration(32, 16, 4, 1), 512: Configuration(32, 16, 8, 1)},
)
declare(
    "chunk_states_and_moments",
    half={
        64: Configuration(64, 32, 8, 1),
        128: Configuration(64, 16, 8, 1),
        256: Configuration(64, 32, 8, 1),
    },
    full={},
)
declare(
    "chunk_gradients",
    half={256: Configuration(64, 32, 8, 1), 512: Configuration(64, 16, 8, 1)},
    full={
        64: Configuration(64, 16, 8, 1),
        512: Configuration(32, 16, 8, 1),
    },
)
declare(
    "delta_prepare",
    half={512: Configuration(64, 64, 8, 1)},
    full={512: Configuration(64, 32, 4, 1)},
)
for _kernel in ("chunk_reads", "chunk_scores_gradient", "chunk_query_gradient"):
    declare(
        _kernel,
        half={512: Configuration(64, 64, 8, 1)},
        full={512: Configuration(64, 32, 8, 1)},
    )
declare(
    "chunk_input_gradient",
    half={256: Configuration(64, 32, 8, 1)},
    full={256: Configuration(64, 16, 8, 1)},
)
for _kernel in ("delta_keys", "value_sums"):
    declare(
        _kernel,
        half={512: Configuration(64, 32, 8, 1)},
        full={512: Configuration(64, 32, 8, 1)},
    )
declare(
    "chunk_key_gradient",
    half={512: Configuration(64, 32, 8, 1)},
    full={64: Configuration(64, 16, 8, 1), 512: Configuration(64, 32, 8, 1)},
)
declare(
    "chunk_moments",
    half={256: Configuration(64, 32, 8, 2)},
    full={256: Configuration(32, 16, 8, 1)},
)
declare(
    "chunk_contraction",
    half={256: Configuration(64, 32, 8, 1)},
    full={256: Configuration(32, 32, 8, 1)},
)
declare(
    "mesa_query",
    half={},
    full={128: Configuration(16, 32, 8, 1)},
)
declare(
    "row_lengths", half={256: Configuration(64, 0, 4, 1)}, full={256: Configuration(64, 0, 4, 1)}
)
declare(
    "channel_scores",
    half={512: Configuration(64, 32, 4, 1)},
    full={},
)
declare(
    "channel_scores_in_full",
    half={512: Configuration(64, 16, 4, 1)},
    full={512: Configuration(32, 16, 4, 1)},
)
declare(
    "channel_gradient",
    half={512: Configuration(64, 32, 4, 1)},
    full={512: Configuration(32, 16, 2, 1)},
)
# Pairs of two kinds in float32 do not fit the registers of 4 warps.
declare("channel_erase_gradient", half={512: Configuration(64, 16, 4, 1)}, full={})
declare(
    "channel_erase_gradient_in_full",
    half={512: Configuration(64, 16, 8, 1)},
    full={512: Configuration(32, 16, 2, 1)},
)
declare(
    "channel_erase_gradient_in_full",
    half={512: Configuration(64, 16, 4, 1)},
    full={},
    architecture="sm_90",
)
# `rows` is the chunk size where channels have gates.
declare(
    "channel_gates",
    half={512: Configuration(64, 32, 4, 1)},
    full={256: Configuration(32, 32, 4, 1)},
)
declare("gate_sums", half={512: Configuration(64, 0, 2, 1)}, full={512: Configuration(64, 0, 2, 1)})
declare(
    "recurrent_step",
    half={256: Configuration(1, 32, 4, 1), 512: Configuration(1, 16, 4, 1)},
    full={256: Configuration(1, 32, 4, 1), 512: Configuration(1, 16, 4, 1)},
)

# A wgmma on Hopper multiplies 64 rows by the columns that the tile leaves to a group of four
# warps: with 16 columns, loading the rows takes longer than the product.
declare(
    "lucid_gradient",
    half={128: Configuration(128, 64, 8, 2)},
    full={64: Configuration(32, 16, 4, 2)},
    architecture="sm_90",
)
declare("lucid_update", half={128: Configuration(128, 64, 8, 2)}, full={}, architecture="sm_90")
declare(
    "lucid_update_with_sums",
    half={128: Configuration(128, 64, 8, 2)},
    full={},
    architecture="sm_90",
)
declare(
    "laser_forward",
    half={
        64: Configuration(128, 64, 4, 3),
        128: Configuration(128, 64, 8, 3),
        512: Configuration(64, 32, 8, 2),
    },
    full={},
    architecture="sm_90",
)
declare(
    "laser_query_gradient",
    half={64: Configuration(64, 64, 4, 2), 128: Configuration(128, 64, 8, 2)},
    full={},
    architecture="sm_90",
)
declare(
    "laser_key_gradient",
    half={128: Configuration(128, 32, 8, 2)},
    full={64: Configuration(32, 32, 8, 1), 128: Configuration(16, 32, 8, 1)},
    architecture="sm_90",
)
declare("softmax_forward", half={128: Configuration(128, 64, 8, 3)}, full={}, architecture="sm_90")
declare(
    "softmax_query_gradient",
    half={128: Configuration(128, 64, 8, 2)},
    full={},
    architecture="sm_90",
)
declare(
    "softmax_key_gradient",
    half={64: Configuration(128, 32, 8, 2), 128: Configuration(64, 32, 8, 2)},
    full={},
    architecture="sm_90",
)
declare(
    "path_block_query_gradient",
    half={64: Configuration(64, 32, 8, 1), 128: Configuration(64, 64, 8, 1)},
    full={},
    architecture="sm_90",
)

declare(
    "path_forward",
    half={},
    full={64: Configuration(32, 16, 8, 1), 512: Configuration(16, 16, 8, 1)},
    architecture="sm_90",
)

# Loads of the next chunk overlap with the products of this one.
declare("chunk_states", half={128: Configuration(64, 32, 8, 2)}, full={}, architecture="sm_90")
declare("delta_prepare", half={128: Configuration(64, 64, 4, 2)}, full={}, architecture="sm_90")
declare(
    "chunk_input_gradient", half={128: Configuration(64, 64, 8, 1)}, full={}, architecture="sm_90"
)
# A second stage would copy the states in pieces of 4 bytes.
declare("chunk_reads", half={128: Configuration(64, 64, 4, 1)}, full={}, architecture="sm_90")
