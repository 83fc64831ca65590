"""The layouts that can divide a call which the chosen one refuses."""

from __future__ import annotations

from collections.abc import Mapping


def advice(refusals: Mapping[str, str | None]) -> str:
    """The end of an error message: which other layouts can divide the call; empty if none can.

    Examples
    --------
    >>> advice({"heads": None, "contiguous": "divides tokens"})
    "; use the layout 'heads'"
    """
    layouts = [repr(layout) for layout, refused in refusals.items() if refused is None]
    return f"; use the layout {' or '.join(layouts)}" if layouts else ""
