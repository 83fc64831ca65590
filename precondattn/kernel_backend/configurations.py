"""A registry of launch configurations: for every kernel, one for each width.

A kernel computes the same with every configuration. Configurations that were the fastest on a
device are preferred to those that were only chosen to compile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

C = TypeVar("C")


class Key(NamedTuple):
    """The properties on which a configuration depends."""

    kernel: str
    width: int
    """The larger of the padded widths of keys and values."""
    half: bool
    """Whether products have 16-bit factors, not 32-bit ones."""


class Configurations(Generic[C]):
    """A backend's configurations, of a type `C` that the backend defines."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        """The padded widths that tiles may have, in ascending order."""
        self.untuned: dict[Key, C] = {}
        """Chosen to compile, for every device."""
        self.chosen: dict[str, dict[Key, C]] = {}
        """Chosen for an architecture, such as "sm_90", and not measured."""
        self.tuned: dict[str, dict[Key, C]] = {}
        """Measured, by the name of the device."""
        self._forced: dict[str, C] = {}

    def declare(
        self, kernel: str, half: Mapping[int, C], full: Mapping[int, C], architecture: str = ""
    ) -> None:
        """A kernel's configurations by the largest width that each is for."""
        into = self.chosen.setdefault(architecture, {}) if architecture else self.untuned
        for is_half, by_width in ((True, half), (False, full)):
            for width in self.widths:
                fitting = [w for w in sorted(by_width) if w >= width]
                if fitting:
                    into[Key(kernel, width, is_half)] = by_width[fitting[0]]

    def find(
        self, kernel: str, width: int, half: bool, device: str = "", architecture: str = ""
    ) -> C:
        """The configuration of a kernel at a padded width.

        One that was measured on the device comes before one that was chosen for its architecture.
        """
        if kernel in self._forced:
            return self._forced[kernel]
        key = Key(kernel, width, half)
        for known in (self.tuned.get(device, {}), self.chosen.get(architecture, {})):
            if key in known:
                return known[key]
        return self.untuned[key]

    @contextmanager
    def forced(self, **configurations: C) -> Iterator[None]:
        """These configurations by kernel, on every device: for tests, and for tuning."""
        before = self._forced
        self._forced = {**before, **configurations}
        try:
            yield
        finally:
            self._forced = before
