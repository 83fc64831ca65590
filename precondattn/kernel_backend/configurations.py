"""A registry of launch configurations, one for each kernel and width.

A kernel computes the same with every configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar, cast

C = TypeVar("C")


class Key(NamedTuple):
    """The properties that a configuration depends on, besides the kernel."""

    kernel: str
    width: int
    """The larger of the padded widths of keys and values."""
    half: bool
    """Whether the factors of products have 16 bits, not 32."""


class Configurations(Generic[C]):
    """A backend's configurations, of a type `C` that the backend defines."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        """The padded widths that tiles may have, in ascending order."""
        self.untuned: dict[Key, C] = {}
        """Configurations that were chosen to compile on every device."""
        self.chosen: dict[str, dict[Key, C]] = {}
        """Configurations chosen for an architecture, such as "sm_90"."""
        self._forced: dict[str, C] = {}

    def declare(
        self, kernel: str, half: Mapping[int, C], full: Mapping[int, C], architecture: str = ""
    ) -> None:
        """Declare a kernel's configurations, by the largest width that each is for."""
        into = self.chosen.setdefault(architecture, {}) if architecture else self.untuned
        for is_half, by_width in ((True, half), (False, full)):
            for width in self.widths:
                fitting = [w for w in sorted(by_width) if w >= width]
                if fitting:
                    into[Key(kernel, width, is_half)] = by_width[fitting[0]]

    def find(self, kernel: str, width: int, half: bool, architecture: str = "") -> C:
        """The configuration of a kernel at a padded width."""
        if kernel in self._forced:
            return self._forced[kernel]
        key = cast("Key", (kernel, width, half))  # Equal to a Key, and made in a third of the time.
        chosen = self.chosen.get(architecture)
        return self.untuned[key] if chosen is None or key not in chosen else chosen[key]

    @contextmanager
    def forced(self, **configurations: C) -> Iterator[None]:
        """A context that forces configurations by kernel on every device, for tests."""
        before = self._forced
        self._forced = {**before, **configurations}
        try:
            yield
        finally:
            self._forced = before
