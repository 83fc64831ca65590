"""Plants a mutant of CUDA text: this process imports a copy of the package and overwrites its file.

The copy is in a temporary folder that comes first on the path. Compiled kernels are in it too.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from precondattn_conformance.mutation.mutant import Mutant
from precondattn_conformance.mutation.planting import forget
from precondattn_conformance.mutation.target import Target

CACHES = ("XDG_CACHE_HOME", "CUPY_CACHE_DIR")
"""Environment variables of caches for compiled kernels, set to keep mutants out of the user's."""


class CopyPlanter:
    """Plants the mutants of a file in a copy of its package."""

    def __init__(self, target: Target, folder: Path) -> None:
        """Copy the package before it is imported; targets of one package share the copy."""
        self.target, self.text = target, target.text
        copy = folder / target.package.name
        if not copy.exists():
            _copy(target.package, copy)
        self.file = copy / target.file.relative_to(target.package)

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Context in which the copy contains the mutant."""
        with self.written(mutant.applied(self.text)):
            yield

    @contextmanager
    def written(self, text: str) -> Iterator[None]:
        """Context in which the copy of the file has this text."""
        self.file.write_text(text, encoding="utf-8")
        forget(self.target.package.name)
        try:
            yield
        finally:
            self.file.write_text(self.text, encoding="utf-8")
            forget(self.target.package.name)


def _copy(package: Path, copy: Path) -> None:
    if package.name in sys.modules:
        raise RuntimeError(f"{package.name} has been imported before it was copied")
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    sys.path.insert(0, str(copy.parent))
    for name in CACHES:
        os.environ[name] = str(copy.parent / "compiled")
