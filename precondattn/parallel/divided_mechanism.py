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
CONTIGUOUS = TokenOrder("contiguous")
"""The order that divides whatever another order of tokens divides."""


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

    def _refusal_by(self, order: TokenOrder | None, call: DividedCall) -> str | None:
        """The reason why an order of tokens, or `heads` without one, can not divide a call."""
        if order is None:
            reason = heads.refusal(call.mechanism, call.sizes, call.devices)
        else:
            call = replace(call, order=order)
            reason = call.refusal_of_tokens() or ways.refusal(call)
        return None if reason is None else f"layout {str(order or HEADS)!r} {reason}"

    def _way(self, call: DividedCall) -> str:
        """How a call is divided; an error if it can not be."""
        way, reason = self._way_of(call)
        if way is None:
            raise ValueError(f"{self.owner}: {reason}")
        return way

    def _way_of(self, call: DividedCall) -> tuple[str | None, str | None]:
        """How a call is divided, or the reason why it can not be."""
        reasons = []
        for order in (None, self.order) if self.layout is None else (self.order,):
            reason = self._refusal_by(order, call)
            if reason is None:
                return HEADS if order is None else TOKENS, None
            reasons.append(reason)
        others = {
            str(order or HEADS): self._refusal_by(order, call) for order in (None, CONTIGUOUS)
        }
        return None, "; ".join(reasons) + advice(others)


def advice(refusals: Mapping[str, str | None]) -> str:
    """The end of an error message: which other layouts can divide the call; empty if none can.

    Examples
    --------
    >>> advice({"heads": None, "contiguous": "divides tokens"})
    "; use the layout 'heads'"
    """
    layouts = [repr(layout) for layout, refused in refusals.items() if refused is None]
    return f"; use the layout {' or '.join(layouts)}" if layouts else ""
