"""Types for the arguments of a caller before they are checked."""

from __future__ import annotations

from typing import Any

Given = Any
"""An argument: an array, a list, a number, or something invalid."""

Arguments = dict[str, Any]
"""Arguments by name."""
