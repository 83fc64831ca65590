"""Tile sizes, warps and stages of every kernel: data.

A kernel asks with the width of its inputs and whether its products are of 16 bits. The numbers were
chosen to compile for compute capabilities 8.0 and 9.0 without spilling; none has been measured.
Whatever the configuration, a kernel computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

WIDTHS = (16, 32, 64, 128, 256)


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
    """The larger of the padded widths of keys and values, one of `WIDTHS`."""
    half: bool
    """Whether its products are of 16 bits, not of 32."""


CONFIGURATIONS: dict[Key, Configuration] = {}
"""Filled by `_declare`, below."""

_forced: dict[str, Configuration] = {}


def configuration(kernel: str, width: int, half: bool) -> Configuration:
    """For a kernel, at a padded width."""
    return _forced.get(kernel) or CONFIGURATIONS[Key(kernel, width, half)]


@contextmanager
def forced(**configurations: Configuration) -> Iterator[None]:
    """These configurations by kernel: for tests, and for tuning."""
    before = dict(_forced)
    _forced.update(configurations)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def _declare(
    kernel: str, half: Mapping[int, Configuration], full: Mapping[int, Configuration]
) -> None:
    """A kernel's configurations by the largest width that each is for."""
    for is_half, by_width in ((True, half), (False, full)):
        for width in WIDTHS:
            fitting = [w for w in sorted(by_width) if w >= width]
            if fitting:
                CONFIGURATIONS[Key(kernel, width, is_half)] = by_width[fitting[0]]


# Of the inverse, `columns` is the length of a super-block.
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
        256: Configuration(32, 32, 8, 1),
    },
)
_declare(
    "lucid_gradient",
    half={128: Configuration(64, 32, 8, 2), 256: Configuration(32, 32, 8, 1)},
    full={
        64: Configuration(32, 32, 4, 1),
        128: Configuration(16, 32, 4, 1),
        256: Configuration(16, 16, 8, 1),
    },
)
_declare(
    "attention_forward",
    half={
        64: Configuration(64, 64, 4, 3),
        128: Configuration(128, 32, 8, 3),
        256: Configuration(64, 32, 8, 2),
    },
    full={64: Configuration(64, 32, 8, 2), 128: Configuration(32, 32, 8, 2)},
)
_declare(
    "attention_query_gradient",
    half={
        64: Configuration(64, 64, 4, 2),
        128: Configuration(128, 32, 8, 2),
        256: Configuration(32, 32, 8, 2),
    },
    full={64: Configuration(32, 32, 4, 1), 128: Configuration(16, 32, 4, 1)},
)
_declare(
    "attention_key_gradient",
    half={
        64: Configuration(128, 32, 8, 2),
        128: Configuration(64, 32, 8, 2),
        256: Configuration(32, 32, 8, 2),
    },
    full={64: Configuration(32, 32, 4, 1), 128: Configuration(16, 16, 8, 1)},
)
_declare(
    "lucid_decode",
    half={128: Configuration(16, 64, 4, 2), 256: Configuration(16, 32, 4, 2)},
    full={128: Configuration(16, 32, 4, 2), 256: Configuration(16, 32, 8, 1)},
)
# Of a recurrence, all kernels have as many rows: the tokens of a chunk.
_declare(
    "chunk_states",
    half={128: Configuration(64, 32, 4, 2), 256: Configuration(64, 32, 8, 1)},
    full={
        64: Configuration(64, 32, 8, 1),
        128: Configuration(32, 16, 4, 1),
        256: Configuration(32, 16, 8, 1),
    },
)
_declare(
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
    _declare(
        _kernel,
        half={256: Configuration(64, 64, 8, 1)},
        full={256: Configuration(64, 32, 8, 1)},
    )
_declare(
    "chunk_key_gradient",
    half={256: Configuration(64, 32, 4, 1)},
    full={256: Configuration(64, 32, 8, 1)},
)
# With a decay for each channel: tiles have 16 tokens.
for _kernel in ("channel_states", "channel_gradients"):
    _declare(
        _kernel,
        half={128: Configuration(64, 32, 8, 1), 256: Configuration(64, 16, 8, 1)},
        full={256: Configuration(32, 16, 8, 1)},
    )
_declare(
    "channel_scores",
    half={256: Configuration(16, 16, 8, 1)},
    full={256: Configuration(16, 16, 4, 1)},
)
for _kernel in ("channel_read", "channel_gradient"):
    _declare(
        _kernel,
        half={256: Configuration(16, 64, 8, 1)},
        full={256: Configuration(16, 64, 8, 1)},
    )
