"""Imports a folder of an installed package without the imports of the package's own modules."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from precondattn_conformance.peers.files import MissingError
from precondattn_conformance.peers.project import Project


def imported_from(project: Project, package: str, folder: str, module: str) -> ModuleType:
    """A module of a folder, which is imported as a package under another name.

        imported_from(TIMM, "timm", "layers", "attention")

    Raises
    ------
    MissingError
        if the package, or an import of the module itself, is not installed.
    """
    alias = f"_precondattn_peer_{package}_{folder.replace('/', '_')}"
    if alias not in sys.modules:
        found = find_spec(package)
        if found is None or found.origin is None:
            raise MissingError(f"{package} is not installed")
        made = ModuleType(alias)
        made.__path__ = [str(Path(found.origin).parent / folder)]
        sys.modules[alias] = made
    return project.imported(f"{alias}.{module}")
