"""Removes control characters from foreign texts, for terminals, browsers and XML parsers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precondattn.json_types import Json


COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Escape sequences of a terminal: colours and cursor movements."""

UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)
"""Control characters but tab and newline, text direction marks, and what XML forbids."""


def printable(text: str) -> str:
    """The text without colours, with control characters as Python's escapes."""
    text = COLOURS.sub("", text).replace("\r\n", "\n")
    return UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def all_printable(value: Json) -> Json:
    """The JSON value with `printable` applied to every string in lists and dicts."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(name): all_printable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [all_printable(each) for each in value]
    return value
