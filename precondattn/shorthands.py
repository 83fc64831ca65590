"""The shorthands, such as `pa.softmax(q, k, v)`: a function for every mechanism of the library.

Type checkers read `shorthands.pyi`, which `docs/make_pages.py` writes.
"""

from __future__ import annotations

from precondattn.algebra import registry
from precondattn.execution.shorthand import shorthand

NAMES = ("contraction_gate", *(n for n, c in registry.classes.items() if c.role != "piece"))
__all__ = list(NAMES)


def __getattr__(name: str) -> object:
    """The shorthand of the mechanism of this name."""
    cls: object = registry.known(name)
    if cls is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = shorthand(cls)
    return globals()[name]
