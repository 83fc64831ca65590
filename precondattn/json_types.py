"""Types for values that are read from JSON or written to it."""

from __future__ import annotations

from typing import Any

Json = Any
"""Any value of JSON."""

JsonObject = dict[str, Json]
