"""A registry of launch configurations, one for each kernel and width, read from a JSON file.

A kernel computes the same with every configuration.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar, cast

from precondattn.json_types import Json, JsonObject

C = TypeVar("C")

ANY_DEVICE = "every device"
PRECISIONS = {"half": True, "full": False}


class Key(NamedTuple):
    """The properties that a configuration depends on, besides the kernel."""

    kernel: str
    width: int
    """The larger of the padded widths of keys and values."""
    half: bool
    """Whether the factors of products have 16 bits, not 32."""


class Configurations(Generic[C]):
    """A backend's configurations, of a type `C` that the backend defines.

    The file has objects in objects: by architecture ("sm_90", or "every device"), kernel, precision
    ("half" or "full"), and the largest width that each is for, the fields of a configuration.

    Raises
    ------
    ValueError
        if a name occurs twice, a precision is another, or a width is none of `widths`.
    """

    def __init__(self, file: Path, kind: Callable[..., C], widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        """The padded widths that tiles may have, in ascending order."""
        self.untuned: dict[Key, C] = {}
        """Configurations that were chosen to compile on every device."""
        self.chosen: dict[str, dict[Key, C]] = {}
        """Configurations chosen for an architecture, such as "sm_90"."""
        self._forced: dict[str, C] = {}
        tables = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_unique)
        for architecture, kernels in tables.items():
            is_any = architecture == ANY_DEVICE
            table = self.untuned if is_any else self.chosen.setdefault(architecture, {})
            for kernel, by_precision in kernels.items():
                for precision, by_width in by_precision.items():
                    largest = {int(width): kind(*fields) for width, fields in by_width.items()}
                    if precision not in PRECISIONS or not {*largest} <= {*self.widths}:
                        raise ValueError(
                            f"{file.name}: {kernel} has {precision!r} and the widths {[*largest]}; "
                            f"expected one of {[*PRECISIONS]} and of {self.widths}"
                        )
                    for width in self.widths:
                        if fitting := [w for w in largest if w >= width]:
                            key = Key(kernel, width, PRECISIONS[precision])
                            table[key] = largest[min(fitting)]

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


def _unique(pairs: list[tuple[str, Json]]) -> JsonObject:
    """An object of the file, whose names differ."""
    names = [name for name, _ in pairs]
    if len({*names}) < len(names):
        raise ValueError(f"a name occurs twice among {names}")
    return dict(pairs)
