"""What a caller gives, before it is checked or passed on."""

from __future__ import annotations

from typing import Any

Given = Any
"""An argument: an array, a list, a number, or something that is refused."""

Arguments = dict[str, Any]
"""Arguments by name."""
