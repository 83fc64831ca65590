"""Which layouts divide a call that another one refuses: they are asked, not guessed."""

from __future__ import annotations

from collections.abc import Mapping


def advice(refusals: Mapping[str, str | None]) -> str:
    """The end of a refusal, of what other layouts say; nothing if all of them refuse.

    Examples
    --------
    >>> advice({"heads": None, "contiguous": "divides tokens"})
    "; use the layout 'heads'"
    """
    layouts = [repr(layout) for layout, refused in refusals.items() if refused is None]
    return f"; use the layout {' or '.join(layouts)}" if layouts else ""
