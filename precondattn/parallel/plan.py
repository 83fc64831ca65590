"""How a call is divided, and what that sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """How a call is divided, and what a device sends to others. `print` it."""

    mechanism: str
    layout: str
    of: str
    """Whose tokens and bytes these are: those of a process, or of each device"""
    tokens: int
    """Its queries"""
    during: str
    """What it has during the call"""
    bytes_sent: Mapping[str, int]
    """By it to others forward, of each array"""

    def __str__(self) -> str:
        lines = [
            f"{self.mechanism}: {self.tokens} tokens on {self.of}",
            f"  layout {self.layout!r}: {self.during} during the call",
            *(f"  {name}: {sent:,} bytes sent" for name, sent in self.bytes_sent.items()),
            f"  in all: {sum(self.bytes_sent.values()):,} bytes sent forward",
        ]
        return "\n".join(lines)
