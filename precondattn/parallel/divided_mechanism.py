"""What `ContextParallel` is in both frameworks: a mechanism, its layout, and who divides a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from precondattn.algebra.mechanism import Mechanism, parse
from precondattn.parallel.layouts import TokenOrder

DividedCall = Any
"""A call whose tokens or heads are divided, of PyTorch or of JAX."""


class DividedMechanism:
    """A mechanism whose calls are divided among devices.

    The modules `_heads` and `_tokens` divide a call in the layout `heads` and in the others.
    """

    _heads: ModuleType
    _tokens: ModuleType

    def __init__(self, mechanism: Mechanism | str, layout: str | None) -> None:
        mechanism = parse(mechanism) if isinstance(mechanism, str) else mechanism
        self.mechanism, self.layout = mechanism, layout
        self.owner = f"context_parallel({mechanism})"
        try:
            self.order = None if layout == "heads" else TokenOrder.read(layout or "contiguous")
        except ValueError as error:
            raise ValueError(f"{self.owner}: {error}") from None
        if mechanism.mixes_sequences:
            raise ValueError(
                f"{self.owner}: the output of a sequence depends on all others, which no layout "
                f"divides"
            )

    def _name_of(self, way: ModuleType) -> str:
        return "heads" if way is self._heads else str(self.order)

    def _refusal_by(self, way: ModuleType, call: DividedCall) -> str | None:
        reason = way.refusal(call)
        return None if reason is None else f"layout {self._name_of(way)!r} {reason}"

    def _way_of(self, call: DividedCall) -> tuple[ModuleType | None, str]:
        """The module that divides a call, or None and the reason why none can."""
        ways = [self._heads] * (self.layout in (None, "heads")) + [self._tokens] * bool(self.order)
        reasons = {way: self._refusal_by(way, call) for way in ways}
        way = next((way for way, reason in reasons.items() if reason is None), None)
        if way is not None:
            return way, ""
        others = {"heads": self._heads.refusal(call), "contiguous": self._refusal_in_order(call)}
        return None, "; ".join(map(str, reasons.values())) + advice(others)

    def _refusal_in_order(self, call: DividedCall) -> str | None:
        """The refusal of `contiguous`, which divides whatever another order of tokens divides."""
        reason: str | None = self._tokens.refusal(call._replace(order=TokenOrder("contiguous")))
        return reason


def advice(refusals: Mapping[str, str | None]) -> str:
    """The end of an error message: which other layouts can divide the call; empty if none can.

    Examples
    --------
    >>> advice({"heads": None, "contiguous": "divides tokens"})
    "; use the layout 'heads'"
    """
    layouts = [repr(layout) for layout, refused in refusals.items() if refused is None]
    return f"; use the layout {' or '.join(layouts)}" if layouts else ""


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
