"""The type of objects of Triton and JAX, whose own types a type checker does not see."""

from __future__ import annotations

from typing import Any

Foreign = Any
