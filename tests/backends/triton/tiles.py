"""Tiles of a few tokens, so that short sequences have several; all checks are on."""

from contextlib import contextmanager

import torch

from precondattn_kernel_tools.triton_interpreter import checked
from precondattn_triton.configurations import REGISTRY, Configuration, forced

RECURRENT = tuple(
    dict.fromkeys(
        key.kernel
        for key in REGISTRY.untuned
        if key.kernel.startswith(
            ("channel_", "chunk_", "delta_", "gate_", "recurrent_", "row_", "value_")
        )
    )
)
"""Tiles of the kernels of a chunkwise recurrence, which must have equal chunks."""

SMALL = {
    "lucid_inverse": Configuration(16, 32),
    "lucid_update": Configuration(16, 16),
    "lucid_update_with_sums": Configuration(16, 16),
    "lucid_gradient": Configuration(16, 16),
    "lucid_decode": Configuration(16, 16),
    "unit_rows": Configuration(8, 0),
    "laser_forward": Configuration(16, 16),
    "laser_query_gradient": Configuration(16, 16),
    "laser_key_gradient": Configuration(16, 16),
    "laser_exact_forward": Configuration(16, 1),
    "laser_exact_query_gradient": Configuration(16, 1),
    "laser_exact_key_gradient": Configuration(16, 1),
    "laser_exact_bias_gradient": Configuration(16, 16),
    "laser_decode": Configuration(0, 16),
    "wide_forward": Configuration(16, 16),
    "wide_query_gradient": Configuration(16, 16),
    "wide_bias_gradient": Configuration(16, 16),
    "wide_key_gradient": Configuration(16, 16),
    "path_chunks": Configuration(16, 16),
    "path_blocks": Configuration(0, 16),
    "path_chunk_gradient": Configuration(0, 16),
    "path_forward": Configuration(16, 16),
    "path_carry": Configuration(16, 0),
    "path_query_gradient": Configuration(16, 0),
    "path_block_query_gradient": Configuration(16, 16),
    "path_key_gradient": Configuration(16, 16),
    "path_block_key_gradient": Configuration(16, 16),
    "path_reflections": Configuration(0, 16),
    "path_within_chunk": Configuration(16, 16),
    "path_decode": Configuration(0, 16),
    "path_gather": Configuration(16, 16),
    "softmax_forward": Configuration(16, 16),
    "softmax_query_gradient": Configuration(16, 16),
    "softmax_key_gradient": Configuration(16, 16),
    "softmax_bias_gradient": Configuration(16, 16),
    **dict.fromkeys(RECURRENT, Configuration(16, 16)),
}


def small_tiles(seed=0, **configurations):
    """A context with small tiles, except for kernels in `configurations`."""
    return tiles_as_given(seed, {**SMALL, **configurations})


@contextmanager
def tiles_as_given(seed, configurations):
    """A context with the given or the shipped tiles, programs in a seeded order, and all checks.

    Unwritten memory is NaN.
    """
    torch.use_deterministic_algorithms(True)
    try:
        with forced(**configurations), checked(seed):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def error(result, expected):
    """The largest difference, divided by the largest expected number or by at least 0.1."""
    difference = (result.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp_min(0.1))
