"""Plug-ins: the objects that installed packages name in an entry-point group.

No lock is held while a plug-in is imported, because its module may call this library, or wait for
one that does. Threads that need plug-ins at the same time all import them, and the first adds them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Lock
from typing import Any

PlugIn = Any


class PlugIns:
    """The entry points of one group."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.broken: dict[str, str] = {}
        """The error of each entry point that could not be imported, by the entry point's name."""
        self.complete = False
        """Whether every entry point was added, or is broken."""
        self._known: set[tuple[str, str]] = set()
        """(name, value) of the entry points that were added, or are broken."""
        self._lock = Lock()

    def load(
        self,
        prepare: Callable[[PlugIn], PlugIn] = lambda named: named,
        add: Callable[[PlugIn], None] = lambda prepared: None,
    ) -> None:
        """Import the entry points that are not known yet, and add the objects that they name.

        `add` runs under a lock, once for each entry point. An error in `prepare`, which may run the
        plug-in's code, or in `add` makes the entry point broken.
        """
        if self.complete:
            return
        from importlib.metadata import entry_points  # Slow to import, and rarely needed.

        found = {(each.name, each.value): each for each in entry_points(group=self.group)}
        for key, entry_point in found.items():
            if key in self._known:
                continue
            prepared, error = None, None
            try:
                prepared = prepare(entry_point.load())
            except (Exception, SystemExit) as raised:  # It must not break the other plug-ins.
                if _is_being_imported(entry_point.module):
                    continue  # This call comes from inside its import; a later call adds it.
                error = raised
            with self._lock:
                if key in self._known:
                    continue
                try:
                    if error is None:
                        add(prepared)
                except ValueError as refused:
                    error = refused
                if error is not None:
                    self.broken[key[0]] = f"{type(error).__name__}: {error}"
                self._known.add(key)
        self.complete = found.keys() <= self._known


def _is_being_imported(module: str) -> bool:
    """Whether the import of the module, or of a package that contains it, has not ended."""
    parts = module.split(".")
    packages = (".".join(parts[: i + 1]) for i in range(len(parts)))
    specs = (getattr(sys.modules.get(package), "__spec__", None) for package in packages)
    return any(getattr(spec, "_initializing", False) for spec in specs)
