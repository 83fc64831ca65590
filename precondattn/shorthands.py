"""The shorthands: `pa.softmax(q, k, v)`, and one for every other mechanism of the library.

A type checker reads them in `shorthands.pyi`, which `docs/make_shorthands.py` writes.
"""

from __future__ import annotations

from precondattn.algebra import registry
from precondattn.execution.shorthand import shorthand


def __getattr__(name: str) -> object:
    """The shorthand of the mechanism of that name, which `import` asks for."""
    cls: object = registry.known(name)
    if cls is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = shorthand(cls)
    return globals()[name]
