"""The plan of a divided call: the layout, and the bytes that are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """How a call is divided, and the bytes that a device sends to others. `print` shows it."""

    mechanism: str
    layout: str
    of: str
    """The name of what the numbers are for: one process, or each device"""
    tokens: int
    """The number of its queries"""
    during: str
    """What it has in memory during the call, in words"""
    bytes_sent: Mapping[str, int]
    """The bytes that it sends to others in the forward pass, by array"""

    def __str__(self) -> str:
        lines = [
            f"{self.mechanism}: {self.tokens} tokens on {self.of}",
            f"  layout {self.layout!r}: {self.during} during the call",
            *(f"  {name}: {sent:,} bytes sent" for name, sent in self.bytes_sent.items()),
            f"  in all: {sum(self.bytes_sent.values()):,} bytes sent forward",
        ]
        return "\n".join(lines)
