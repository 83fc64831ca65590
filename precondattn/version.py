"""The version: the only place that has it.

The distribution (`pyproject.toml`), the docs (`docs/conf.py`), records of conformance runs and
saved caches (`cache/saved.py`) read it here. `CHANGELOG.md` has a heading for it.
"""

from __future__ import annotations

__version__ = "0.2.0"


def numbers_of(version: str) -> tuple[int, ...]:
    """The three numbers of a version.

    Examples
    --------
    >>> numbers_of("0.2.0.dev1")
    (0, 2, 0)
    """
    return tuple(int(part) for part in version.split(".")[:3])
