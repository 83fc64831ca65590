"""The text of `train_a_language_model.md`, its batches and its losses, as the page defines them."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def tutorial() -> dict[str, Any]:
    """What the page defines before it trains, by its own names."""
    from make_tutorial import functions

    return functions()
