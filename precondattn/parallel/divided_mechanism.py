"""What `ContextParallel` is in both frameworks: a mechanism, its layout, and who divides a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from precondattn.algebra.mechanism import Mechanism, parse
from precondattn.arrays import Array
from precondattn.parallel import heads, ways
from precondattn.parallel.heads import DividedCall
from precondattn.parallel.layouts import TokenOrder

HEADS, TOKENS = "heads", "tokens"


class DividedMechanism:
    """A mechanism whose calls are divided among devices, by heads or by tokens."""

    outputs: Mapping[str, Callable[..., Array]]
    """The functions that compute the output of a call divided by `HEADS` or by `TOKENS`"""

    def __init__(self, mechanism: Mechanism | str, layout: str | None) -> None:
        mechanism = parse(mechanism) if isinstance(mechanism, str) else mechanism
        self.mechanism, self.layout = mechanism, layout
        self.owner = f"context_parallel({mechanism})"
        try:
            self.order = None if layout == HEADS else TokenOrder.read(layout or "contiguous")
        except ValueError as error:
            raise ValueError(f"{self.owner}: {error}") from None
        if mechanism.mixes_sequences:
            raise ValueError(
                f"{self.owner}: the output of a sequence depends on all others, which no layout "
                f"divides"
            )

    def _refusal_by(self, way: str, call: DividedCall) -> str | None:
        if way == HEADS:
            reason = heads.refusal(call.mechanism, call.sizes, call.devices)
        else:
            reason = call.refusal_of_tokens() or ways.refusal(call)
        name = HEADS if way == HEADS else str(call.order)
        return None if reason is None else f"layout {name!r} {reason}"

    def _way_of(self, call: DividedCall) -> tuple[str | None, str]:
        """How a call is divided, or None and the reason why it can not be."""
        possible = [HEADS] * (self.layout in (None, HEADS)) + [TOKENS] * bool(self.order)
        reasons = {way: self._refusal_by(way, call) for way in possible}
        way = next((way for way, reason in reasons.items() if reason is None), None)
        if way is not None:
            return way, ""
        others = {HEADS: self._refusal_by(HEADS, call), "contiguous": self._refusal_in_order(call)}
        return None, "; ".join(map(str, reasons.values())) + advice(others)

    def _refusal_in_order(self, call: DividedCall) -> str | None:
        """The refusal of `contiguous`, which divides whatever another order of tokens divides."""
        return self._refusal_by(TOKENS, replace(call, order=TokenOrder("contiguous")))

    def _plan_of(self, call: DividedCall, way: str, of: str) -> Plan:
        """How a call is divided, by `HEADS` or by `TOKENS`."""
        room, layout = (heads, HEADS) if way == HEADS else (ways, str(self.order))
        tokens, during = call.counts[call.place], room.during(call)
        return Plan(str(self.mechanism), layout, of, tokens, during, room.bytes_sent(call))


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
