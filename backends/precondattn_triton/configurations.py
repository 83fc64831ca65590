"""Tile sizes, warps and stages of every kernel: data, by what was measured on which device.

A kernel asks with the width of its inputs and whether its products are of 16 bits. Devices that
stand in `TUNED` have numbers of their own; all others, and the interpreter's tests, have `UNTUNED`,
which was chosen to compile for compute capability 8.0 and above without spilling. Whatever the
configuration, a kernel computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple


class Configuration(NamedTuple):
    """How a kernel is cut and run."""

    rows: int
    """Tokens of a program's own tile."""
    columns: int
    """Tokens of the tiles that it goes over."""
    warps: int = 4
    stages: int = 2


class Key(NamedTuple):
    """What a configuration depends on."""

    kernel: str
    width: int
    """The larger of the padded widths of keys and values: 16, 32, 64, 128, 256 or 512."""
    half: bool
    """Whether its products are of 16 bits, not of 32."""


UNTUNED: dict[Key, Configuration] = {}
"""Filled by `_declare`, below."""

TUNED: dict[str, dict[Key, Configuration]] = {}
"""By the name of the device, from measurements alone; empty as long as there are none."""

_forced: dict[str, Configuration] = {}


def _declare(
    kernel: str, half: Mapping[int, Configuration], full: Mapping[int, Configuration]
) -> None:
    """A kernel's configurations by the largest width that each is for."""
    for is_half, by_width in ((True, half), (False, full)):
        for width in (16, 32, 64, 128, 256, 512):
            fitting = [w for w in sorted(by_width) if w >= width]
            if fitting:
                UNTUNED[Key(kernel, width, is_half)] = by_width[fitting[0]]


def configuration(kernel: str, width: int, half: bool, like: Any = None) -> Configuration:
    """For a kernel, at a padded width, on the device of a tensor."""
    if kernel in _forced:
        return _forced[kernel]
    key = Key(kernel, width, half)
    return TUNED.get(_device_name(like), {}).get(key) or UNTUNED[key]


def _device_name(like: Any) -> str:
    """A GPU's model; empty for whatever is none."""
    if like is None or not like.is_cuda:
        return ""
    import torch

    name: str = torch.cuda.get_device_name(like.device)
    return name


@contextmanager
def forced(**configurations: Configuration) -> Iterator[None]:
    """These configurations by kernel, whatever the device: for tests, and for tuning."""
    before = dict(_forced)
    _forced.update(configurations)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


_declare(
    "lucid_inverse",
    half={128: Configuration(64, 512, 4, 3), 256: Configuration(64, 512, 4, 1)},
    full={256: Configuration(32, 512, 4, 1)},
)
_declare(
    "lucid_update",
    half={128: Configuration(128, 64, 8, 2), 256: Configuration(64, 32, 8, 2)},
    full={
        64: Configuration(64, 32, 4, 1),
        128: Configuration(32, 32, 8, 1),
        256: Configuration(32, 16, 8, 1),
    },
)
_declare(
    "lucid_gradient",
    half={
        128: Configuration(64, 32, 8, 2),
        256: Configuration(32, 32, 8, 1),
    },
    full={
        64: Configuration(32, 32, 4, 1),
        128: Configuration(16, 32, 8, 1),
        256: Configuration(16, 16, 8, 1),
    },
)
_declare(
    "lucid_decode",
    half={128: Configuration(16, 64, 4, 2), 256: Configuration(16, 32, 4, 2)},
    full={128: Configuration(16, 32, 4, 2), 256: Configuration(16, 32, 8, 1)},
)
_declare("unit_rows", half={512: Configuration(8, 0, 4)}, full={512: Configuration(8, 0, 4)})
_declare(
    "laser_forward",
    half={
        64: Configuration(128, 64, 4, 3),
        128: Configuration(128, 64, 8, 3),
        512: Configuration(64, 32, 8, 2),
    },
    full={
        64: Configuration(64, 32, 8, 2),
        128: Configuration(32, 32, 8, 2),
        256: Configuration(16, 32, 8, 1),
        512: Configuration(32, 32, 8, 1),
    },
)
_declare(
    "laser_exact_forward",
    half={128: Configuration(32, 1, 8, 1), 512: Configuration(16, 1, 4, 1)},
    full={128: Configuration(32, 1, 8, 1), 512: Configuration(16, 1, 4, 1)},
)
_declare(
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
_declare(
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
_declare(
    "laser_exact_query_gradient",
    half={512: Configuration(16, 1, 4, 1)},
    full={512: Configuration(16, 1, 4, 1)},
)
_declare(
    "laser_exact_key_gradient",
    half={512: Configuration(16, 1, 4, 1)},
    full={512: Configuration(16, 1, 4, 1)},
)
_declare(
    "path_chunks",
    half={256: Configuration(32, 64, 4, 1)},
    full={256: Configuration(16, 32, 4, 1)},
)
_declare(
    "path_forward",
    half={
        64: Configuration(64, 0, 4, 2),
        128: Configuration(64, 0, 8, 2),
        256: Configuration(32, 0, 8, 1),
        512: Configuration(32, 0, 8, 1),
    },
    full={
        64: Configuration(32, 0, 4, 1),
        128: Configuration(16, 0, 8, 1),
        512: Configuration(16, 0, 8, 1),
    },
)
_declare(
    "path_carry",
    half={512: Configuration(64, 0, 8, 1)},
    full={512: Configuration(16, 0, 4, 1)},
)
_declare(
    "path_query_gradient",
    half={64: Configuration(64, 0, 8, 1), 512: Configuration(32, 0, 8, 1)},
    full={128: Configuration(16, 0, 8, 1), 512: Configuration(16, 0, 16, 1)},
)
_declare(
    "path_key_gradient",
    half={512: Configuration(32, 32, 8, 1)},
    full={512: Configuration(16, 16, 8, 1)},
)
_declare(
    "path_reflections",
    half={256: Configuration(0, 32, 8, 1)},
    full={256: Configuration(0, 16, 8, 1)},
)
_declare(
    "path_own_scores",
    half={512: Configuration(32, 32, 4, 1)},
    full={512: Configuration(16, 32, 4, 1)},
)
_declare(
    "path_gather",
    half={512: Configuration(32, 128, 4, 1)},
    full={512: Configuration(16, 64, 4, 1)},
)
_declare(
    "path_decode",
    half={256: Configuration(0, 32, 4, 2)},
    full={128: Configuration(0, 32, 4, 2), 256: Configuration(0, 32, 8, 1)},
)
_declare(
    "differential_forward",
    half={
        128: Configuration(64, 64, 8, 2),
        256: Configuration(64, 32, 8, 1),
        512: Configuration(32, 32, 8, 1),
    },
    full={
        64: Configuration(32, 32, 8, 1),
        128: Configuration(16, 32, 8, 1),
        512: Configuration(16, 16, 8, 1),
    },
)
_declare(
    "differential_query_gradient",
    half={128: Configuration(64, 32, 8, 2), 512: Configuration(32, 32, 8, 1)},
    full={64: Configuration(32, 32, 8, 1), 512: Configuration(16, 16, 8, 1)},
)
_declare(
    "differential_key_gradient",
    half={128: Configuration(32, 32, 8, 1), 512: Configuration(32, 16, 8, 1)},
    full={64: Configuration(16, 32, 8, 1), 256: Configuration(16, 16, 8, 1)},
)

# Of a recurrence, all kernels have as many rows: the tokens of a chunk. So have CCQ's query's.
_declare(
    "chunk_states",
    half={256: Configuration(64, 32, 8, 1)},
    full={
        64: Configuration(64, 32, 8, 1),
        128: Configuration(32, 16, 4, 1),
        256: Configuration(32, 16, 8, 1),
    },
)
_declare(
    "chunk_states_and_moments",
    half={256: Configuration(64, 32, 8, 1)},
    full={},
)
_declare(
    "chunk_gradients",
    half={256: Configuration(64, 32, 8, 1)},
    full={
        64: Configuration(64, 16, 8, 1),
        256: Configuration(32, 16, 8, 1),
    },
)
_declare(
    "delta_prepare",
    half={256: Configuration(64, 64, 8, 1)},
    full={256: Configuration(64, 32, 4, 1)},
)
for _kernel in ("chunk_reads", "chunk_scores_gradient", "chunk_query_gradient"):
    _declare(
        _kernel,
        half={256: Configuration(64, 64, 8, 1)},
        full={256: Configuration(64, 32, 8, 1)},
    )
for _kernel in ("chunk_inverse", "delta_keys", "value_sums"):
    _declare(
        _kernel,
        half={256: Configuration(64, 32, 8, 1)},
        full={256: Configuration(64, 32, 8, 1)},
    )
_declare(
    "chunk_key_gradient",
    half={256: Configuration(64, 32, 8, 1)},
    full={64: Configuration(64, 16, 8, 1), 256: Configuration(64, 32, 8, 1)},
)
_declare(
    "chunk_moments",
    half={256: Configuration(64, 32, 8, 2)},
    full={256: Configuration(32, 16, 8, 1)},
)
_declare(
    "chunk_contraction",
    half={256: Configuration(64, 32, 8, 1)},
    full={256: Configuration(32, 32, 8, 1)},
)
_declare(
    "row_lengths", half={256: Configuration(64, 0, 4, 1)}, full={256: Configuration(64, 0, 4, 1)}
)
_declare(
    "channel_scores",
    half={256: Configuration(64, 32, 4, 1)},
    full={256: Configuration(64, 32, 4, 1)},
)
_declare(
    "channel_gradient",
    half={256: Configuration(64, 32, 4, 1)},
    full={256: Configuration(64, 16, 4, 1)},
)
_declare(
    "channel_gates",
    half={256: Configuration(64, 32, 4, 1)},
    full={256: Configuration(64, 32, 4, 1)},
)
_declare(
    "gate_sums", half={256: Configuration(64, 0, 2, 1)}, full={256: Configuration(64, 0, 2, 1)}
)
_declare(
    "recurrent_step",
    half={256: Configuration(1, 32, 4, 1)},
    full={256: Configuration(1, 32, 4, 1)},
)
