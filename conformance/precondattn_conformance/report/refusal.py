"""Short reasons of refusals. The full texts name every piece of a mechanism, so all differ."""

from __future__ import annotations

import re

ANSWER = re.compile(r"^\s+(?P<backend>[\w./-]+)(?: for .+?)?: (?P<why>.+)$", re.MULTILINE)
"""A line of an explanation: a backend, possibly a piece, and the reason."""


def in_few_words(reason: str, backends: tuple[str, ...] = ()) -> str:
    """The backends' reasons for the pieces, each once, or else the text's first line."""
    answers = [
        match["why"].strip()
        for match in ANSWER.finditer(reason)
        if not backends or match["backend"] in backends
    ]
    if answers:
        return "; ".join(dict.fromkeys(answers))
    return reason.strip().partition("\n")[0].rstrip(":") or "no reason given"
