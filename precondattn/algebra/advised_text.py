"""The expression that was probably meant by a text that is not a valid expression.

It is found by repairing common mistakes: capitals, names of other libraries, Python calls, True and
None, options in round or curly brackets, missing brackets, and lists of names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from precondattn.algebra import registry
from precondattn.algebra.foreign_mechanisms import expression_elsewhere, in_our_spelling

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_-]*(?![A-Za-z0-9_-]*\s*=)")
"""A word that is not the name of an option."""
_OPTIONS = re.compile(r"\(((?:\s*\w+\s*=\s*[^,()\[\]]+,?)+)\)")
_LIST = re.compile(r"\s*[\w-]+(?:\s*(?:,|\+|->|\u2218|\s)\s*[\w-]+)+\s*")
"""A list of names."""
_CLOSING = {"(": ")", "[": "]"}


def advised(text: str, read: Callable[[str], object]) -> str | None:
    """The expression that was probably meant and that `read` accepts; None if there is none."""
    for candidate in _candidates(text):
        if candidate != text:
            try:
                return str(read(candidate))
            except (TypeError, ValueError):
                continue
    return None


def _candidates(text: str) -> Iterator[str]:
    known = sorted(registry.nameable())

    def spelled(word: re.Match[str]) -> str:
        ours = in_our_spelling(word[0], known)
        return ours or expression_elsewhere(word[0], known) or word[0]

    plain = re.sub(r"\b(?:pa|precondattn)\.", "", text).replace("()", "")
    plain = plain.translate(str.maketrans("{}:", "[]="))
    plain = _OPTIONS.sub(r"[\1]", plain)
    plain = re.sub(r"=\s*(True|False|None)\b", lambda m: f"={m[1].lower()}", plain)
    spaced = re.sub(r"\s+", "_", text.strip())
    nested = "(".join(re.findall(r"\w[\w-]*", text)) if _LIST.fullmatch(text) else plain
    for each in (
        plain,
        _WORD.sub(spelled, plain),
        _whole(spaced, known),
        _WORD.sub(spelled, nested),
    ):
        yield each
        yield _closed(each)


def _whole(name: str, known: list[str]) -> str:
    """The name of a mechanism that was written as several words."""
    return in_our_spelling(name, known) or expression_elsewhere(name, known) or name


def _closed(text: str) -> str:
    """The text with missing closing brackets added, and surplus ones removed."""
    missing: list[str] = []
    kept = ""
    for mark in text:
        if mark in _CLOSING:
            missing.append(_CLOSING[mark])
        elif mark in _CLOSING.values():
            if not missing:
                continue
            mark = missing.pop()
        kept += mark
    return kept + "".join(reversed(missing))
