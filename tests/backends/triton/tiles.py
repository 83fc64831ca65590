"""Tiles of a few tokens, so that short sequences have several; all checks are on."""

from contextlib import contextmanager

import torch

from precondattn_kernel_tools.triton_interpreter import checked
from precondattn_triton.configurations import REGISTRY, Configuration, forced

GRADIENTS = ("query_gradient", "key_gradient")
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

NO_ROWS = ("laser_decode", "path_blocks", "path_chunk_gradient", "path_decode", "path_reflections")
SMALL = {
    **{key.kernel: Configuration(16, 16) for key in REGISTRY.untuned},
    **dict.fromkeys(NO_ROWS, Configuration(0, 16)),
    **dict.fromkeys(("path_carry", "path_query_gradient"), Configuration(16, 0)),
    **{f"laser_exact_{kind}": Configuration(16, 1) for kind in ("forward", *GRADIENTS)},
    "lucid_inverse": Configuration(16, 32),
    "unit_rows": Configuration(8, 0),
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
