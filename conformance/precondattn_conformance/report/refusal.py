"""The few words of a refusal. In full it names every piece of a mechanism, so no two are alike."""

from __future__ import annotations

import re

ANSWER = re.compile(r"^\s+(?P<backend>[\w.-]+)(?: for .+?)?: (?P<why>.+)$", re.MULTILINE)
"""A line of an explanation: a backend, perhaps a piece, and why not."""


def in_few_words(reason: str, backends: tuple[str, ...] = ()) -> str:
    """What the backends said of the pieces, each answer once; else the first line of the reason."""
    answers = [
        found["why"].strip()
        for found in ANSWER.finditer(reason)
        if not backends or found["backend"] in backends
    ]
    if answers:
        return "; ".join(dict.fromkeys(answers))
    return reason.strip().partition("\n")[0].rstrip(":") or "no reason given"
