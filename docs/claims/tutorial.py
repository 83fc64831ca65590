"""The text of `train_a_language_model.md`, its batches and its losses, as the page defines them."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def tutorial() -> dict[str, Any]:
    """The definitions of the page before its first training, by name."""
    from make_tutorial import functions

    return functions()
