"""What `ContextParallel` is in both frameworks: a mechanism, its layout, and who divides a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

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

    def _way(self, call: DividedCall) -> str:
        """How a call is divided; an error if it can not be."""
        way, reason = self._way_of(call)
        if way is None:
            raise ValueError(f"{self.owner}: {reason}")
        return way

    def _way_of(self, call: DividedCall) -> tuple[str | None, str | None]:
        """How a call is divided, or the reason why it can not be."""
        possible = [HEADS] * (self.layout in (None, HEADS)) + [TOKENS] * bool(self.order)
        reasons = {way: self._refusal_by(way, call) for way in possible}
        way = next((way for way, reason in reasons.items() if reason is None), None)
        if way is not None:
            return way, None
        others = {HEADS: self._refusal_by(HEADS, call), "contiguous": self._refusal_in_order(call)}
        return None, "; ".join(map(str, reasons.values())) + advice(others)

    def _refusal_in_order(self, call: DividedCall) -> str | None:
        """The refusal of `contiguous`, which divides whatever another order of tokens divides."""
        return self._refusal_by(TOKENS, replace(call, order=TokenOrder("contiguous")))


def advice(refusals: Mapping[str, str | None]) -> str:
    """The end of an error message: which other layouts can divide the call; empty if none can.

    Examples
    --------
    >>> advice({"heads": None, "contiguous": "divides tokens"})
    "; use the layout 'heads'"
    """
    layouts = [repr(layout) for layout, refused in refusals.items() if refused is None]
    return f"; use the layout {' or '.join(layouts)}" if layouts else ""
