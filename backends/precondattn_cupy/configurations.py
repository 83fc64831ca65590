"""Tiles of every kernel: data. Whatever the tiles, a kernel computes the same.

A kernel asks with the larger of its widths of keys and values, padded, and whether its products
are of 16 bits. What stands here was chosen to compile for compute capability 8.0 and above without
spills up to 128 channels; nothing was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

WIDTHS = (16, 32, 64, 128, 256, 512)
"""Of tiles: an array of other widths is filled up with zeros."""


class Configuration(NamedTuple):
    """How a kernel is cut."""

    rows: int
    """Tokens of a block's own tile: 16 for each of its warps."""
    columns: int = 16
    """Tokens of the tiles that it goes over."""

    @property
    def threads(self) -> int:
        return 2 * self.rows


class Key(NamedTuple):
    """What a configuration depends on."""

    kernel: str
    width: int
    half: bool


UNTUNED: dict[Key, Configuration] = {}

_forced: dict[str, Configuration] = {}


def declare(
    kernel: str, half: Mapping[int, Configuration], full: Mapping[int, Configuration]
) -> None:
    """A kernel's configurations by the largest width that each is for."""
    for is_half, by_width in ((True, half), (False, full)):
        for width in WIDTHS:
            fitting = [w for w in sorted(by_width) if w >= width]
            if fitting:
                UNTUNED[Key(kernel, width, is_half)] = by_width[fitting[0]]


def padded_width(width: int) -> int:
    """The least width of tiles that holds so many channels.

    Raises
    ------
    ValueError
        where none does.
    """
    found = next((w for w in WIDTHS if w >= width), None)
    if found is None:
        raise ValueError(f"rows have at most {WIDTHS[-1]} numbers; found {width}")
    return found


def configuration(kernel: str, width: int, half: bool) -> Configuration:
    """For a kernel, at a padded width."""
    return _forced.get(kernel) or UNTUNED[Key(kernel, width, half)]


@contextmanager
def forced(**configurations: Configuration) -> Iterator[None]:
    """Other tiles for some kernels, by their names."""
    before = dict(_forced)
    _forced.update(configurations)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


declare(
    "lucid_inverse",
    half={256: Configuration(64, 512)},
    full={256: Configuration(32, 512)},
)
declare(
    "lucid_update",
    half={128: Configuration(128, 32), 256: Configuration(64, 32)},
    full={128: Configuration(64, 16), 256: Configuration(32, 16)},
)
declare(
    "lucid_gradient",
    half={128: Configuration(64, 32), 256: Configuration(32, 16)},
    full={128: Configuration(64, 16), 256: Configuration(32, 16)},
)
declare(
    "lucid_decode",
    half={128: Configuration(16, 32), 256: Configuration(16, 16)},
    full={256: Configuration(16, 16)},
)
