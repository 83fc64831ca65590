"""Mechanisms as text: `"lucid[eps=0](laser)"`, the inverse of `str`.

    expression := name [ "[" option "=" value { "," option "=" value } "]" ] [ "(" expression ")" ]

`str` omits options that have their default, and a base that is plain softmax.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from precondattn.algebra import registry
from precondattn.algebra.options import OptionValue, fields_of, text_of
from precondattn.algebra.registry import AnyMechanism, Registered
from precondattn.limits import NESTED

_NAME = re.compile(r"\s*([a-z][a-z0-9_]*)\s*")
_VALUE = re.compile(r"\s*([^,\]\[()\s][^,\]\[()]*)(?=[,\]])")

SHOWN = 60
"""Characters of a long text that a message shows, before and after a position."""


def text_of_mechanism(mechanism: Registered) -> str:
    """The expression that `parse` turns back into an equal mechanism."""
    options = [
        f"{name}={text_of(getattr(mechanism, name))}"
        for name, field in fields_of(mechanism).items()
        if getattr(mechanism, name) != field.default
    ]
    text = mechanism.name + (f"[{','.join(options)}]" if options else "")
    base = getattr(mechanism, "base", None)
    return text if base is None or base == _default_base(type(mechanism)) else f"{text}({base})"


def _default_base(cls: type[Registered]) -> OptionValue:
    return next((f.default for f in dataclasses.fields(cls) if f.name == "base"), None)


def read(text: str) -> AnyMechanism:
    """The mechanism that an expression names: `parse`, without a compiler's view of it."""
    if not isinstance(text, str):
        raise TypeError(f"an expression is text such as 'lucid(laser)'; found {text!r}")
    reader = _Reader(text)
    mechanism = reader.mechanism()
    if reader.at != len(text):
        reader.fail("the end of the expression")
    return mechanism


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.shown = _quoted(text)

    def fail(self, expected: str) -> NoReturn:
        start, end = max(0, self.at - SHOWN), self.at + SHOWN
        before, after = "…" * (start > 0), "…" * (end < len(self.text))
        pointer = " " * (len(before) + self.at - start) + "^"
        part = f"{before}{self.text[start:end]}{after}"
        raise ValueError(f"expected {expected} here:\n  {part}\n  {pointer}")

    def accept(self, mark: str) -> bool:
        if not self.text.startswith(mark, self.at):
            return False
        self.at = re.compile(r"\s*").match(self.text, self.at + len(mark)).end()  # type: ignore[union-attr]
        return True

    def word(self, pattern: re.Pattern[str], expected: str) -> str:
        match = pattern.match(self.text, self.at)
        if match is None:
            self.fail(expected)
        self.at = match.end()
        return match[1].rstrip()

    def mechanism(self, depth: int = 0) -> AnyMechanism:
        if depth > NESTED:
            raise ValueError(f"{self.shown}: at most {NESTED} preconditioners can be nested")
        name = self.word(_NAME, "the name of a mechanism")
        cls = registry.find(name)
        if cls is None:
            known = sorted(n for n, c in registry.registered().items() if c.role != "piece")
            broken = registry.broken.items()
            errors = "".join(f"\n  {entry} could not be imported: {e}" for entry, e in broken)
            raise ValueError(
                f"{self.shown}: unknown mechanism {_quoted(name)}{nearest(name, known)}; "
                f"known are {', '.join(known)}{errors}"
            )
        arguments = self.options(cls)
        if self.accept("("):
            if _default_base(cls) is None:
                raise ValueError(f"{self.shown}: {name} is a {cls.role} and takes no base")
            arguments["base"] = self.mechanism(depth + 1)
            if not self.accept(")"):
                self.fail("')'")
        return cls(**arguments)

    def options(self, cls: type[Registered]) -> dict[str, OptionValue]:
        known, options = fields_of(cls), dict[str, Any]()
        if not self.accept("["):
            return options
        while not self.accept("]"):
            name = self.word(_NAME, "the name of an option")
            if name not in known:
                raise ValueError(
                    f"{self.shown}: {cls.name} has no option {_quoted(name)}"
                    f"{nearest(name, known)}; it has {', '.join(known) or 'none'}"
                )
            if name in options:
                raise ValueError(f"{self.shown}: option {name} is given twice")
            if not self.accept("="):
                self.fail(f"'=' and the value of {name}")
            value = self.word(_VALUE, f"the value of {name}")
            options[name] = known[name].metadata["kind"].read(value)
            if not self.accept(",") and not self.text.startswith("]", self.at):
                self.fail("',' or ']'")
        return options


def _quoted(text: str) -> str:
    """The text, or the beginning of a long one, in quotes."""
    return repr(text) if len(text) <= 2 * SHOWN else f"{text[: 2 * SHOWN]!r}…"


def nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name[:SHOWN], list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
