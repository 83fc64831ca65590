"""Checks that results can be written, before a long run."""

from __future__ import annotations

import os
from pathlib import Path


def require_writable(*files: Path | None, folder: Path | None = None) -> None:
    """Raise a ValueError for a file or folder that can not be written."""
    for path in files:
        if path is not None and path.is_dir():
            raise ValueError(f"{path} is a folder; the name of a file is needed")
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; the name of a folder is needed")
    for path in (*files, folder):
        if path is None:
            continue
        existing = next(each for each in (path, *path.absolute().parents) if each.exists())
        may_be = existing.is_dir() or existing == path
        if not may_be or not os.access(existing, os.W_OK):
            raise ValueError(f"{path} can not be written: no permission, or {existing} is a file")
