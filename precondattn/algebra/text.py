"""Mechanisms as text: `"lucid[eps=0](laser)"`, the inverse of `str`.

    expression := name [ "[" option "=" value { "," option "=" value } "]" ] [ "(" expression ")" ]

`str` omits options that have their default, and a base that is plain softmax.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from typing import NoReturn

from precondattn.algebra import registry
from precondattn.algebra.options import OptionValue, fields_of, text_of
from precondattn.algebra.other_names import in_our_spelling, keyword_elsewhere, mechanism_elsewhere
from precondattn.algebra.registry import AnyMechanism, Registered
from precondattn.limits import NESTED

_NAME = re.compile(r"\s*([a-z][a-z0-9_]*)\s*")
_MECHANISM = re.compile(r"\s*([A-Za-z][A-Za-z0-9_-]*)\s*")
"""The name of a mechanism, including the spellings of other libraries."""
_MECHANISM_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_SETTING = re.compile(r"\s*=\s*([^,\]\[()\s][^,\]\[()]*)")
_VALUE = re.compile(r"\s*([^,\]\[()\s][^,\]\[()]*)")

SHOWN = 60
"""The characters of a long text that a message shows before and after a position."""


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
    """The mechanism of an expression: `parse` without the special case of compilers."""
    if not isinstance(text, str):
        is_mechanism = hasattr(type(text), "program")
        found = f"the mechanism {text}, which needs no parse" if is_mechanism else repr(text)
        raise TypeError(f"an expression is text such as 'lucid(laser)'; found {found}")
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
        before, after = "..." * (start > 0), "..." * (end < len(self.text))
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
        name = self.word(_MECHANISM, "the name of a mechanism")
        cls = registry.find(name)
        if cls is None:
            names, elsewhere = sorted(registry.nameable()), mechanism_elsewhere(name)
            unknown = f"{self.shown}: unknown mechanism {_quoted(name)}"
            if elsewhere is not None:
                raise ValueError(f"{unknown}; here it is {elsewhere!r}")
            broken = registry.broken.items()
            errors = "".join(f"\n  {entry} could not be imported: {e}" for entry, e in broken)
            hint = nearest(in_our_spelling(name), names)
            raise ValueError(f"{unknown}{hint}; known are {', '.join(names)}{errors}")
        arguments = self.options(cls)
        if self.accept("("):
            if _default_base(cls) is None:
                raise ValueError(f"{self.shown}: {name} is a {cls.role} and takes no base")
            arguments["base"] = self.mechanism(depth + 1)
            if not self.accept(")"):
                self.fail("')'")
        return cls(**arguments)

    def options(self, cls: type[Registered]) -> dict[str, OptionValue]:
        fields, options = fields_of(cls), dict[str, OptionValue]()
        if not self.accept("["):
            return options
        while not self.accept("]"):
            name = self.word(_NAME, "the name of an option")
            if name not in fields:
                setting = _SETTING.match(self.text, self.at)
                hint = hint_at_option(cls, name, "..." if setting is None else setting[1].rstrip())
                raise ValueError(
                    f"{self.shown}: {cls.name} has no option {_quoted(name)}{hint}; "
                    f"it has {', '.join(fields) or 'none'}"
                )
            if name in options:
                raise ValueError(f"{self.shown}: option {name} is given twice")
            if not self.accept("="):
                self.fail(f"'=' and the value of {name}")
            value = self.word(_VALUE, f"the value of {name}")
            options[name] = fields[name].metadata["kind"].read(value)
            if not self.accept(",") and not self.text.startswith("]", self.at):
                is_at_end = self.at == len(self.text)
                self.fail("']' (a bracket is missing)" if is_at_end else "',' or ']'")
        return options


def _quoted(text: str) -> str:
    """The text, or the beginning of a long one, in quotes."""
    return repr(text) if len(text) <= 2 * SHOWN else f"{text[: 2 * SHOWN]!r}..."


def hint_at_option(cls: type[Registered], name: str, value: str) -> str:
    """The hint for an option that a mechanism does not have: its base, or a name, that has it."""
    base = _default_base(cls)
    if base is not None and name in fields_of(base):
        return f" (it belongs to the base: {cls.name}({base.name}[{name}={value}]))"
    return keyword_elsewhere(name) or nearest(name, fields_of(cls))


def hint_at_keyword(owner: str, name: str, value: str, keywords: Iterable[str]) -> str:
    """The hint for a keyword that a call of this mechanism does not accept."""
    for word in _MECHANISM_IN_TEXT.findall(owner):
        cls = registry.known(word)
        for each in (cls, None if cls is None else _default_base(cls)):
            if each is not None and name in fields_of(each):
                whose = each if isinstance(each, type) else type(each)
                option = f"pa.{whose.__name__}({name}={value})"
                return f" (an option, which is set before the call: {option})"
    return keyword_elsewhere(name) or nearest(name, keywords)


def plain(value: OptionValue) -> str:
    """A setting as Python code; … for a value such as an array."""
    return repr(value) if isinstance(value, bool | int | float | str | None) else "..."


def nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name[:SHOWN], list(names), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def name_given(value: OptionValue) -> str | None:
    """The expression of a mechanism given as an object, text, class or shorthand; or None."""
    if isinstance(value, str):
        return value
    cls = getattr(getattr(value, "__wrapped__", None), "cls", value)
    if isinstance(cls, type):
        name: str | None = getattr(cls, "name", None) if hasattr(cls, "variants") else None
        return name
    return str(value) if hasattr(value, "program") else None


def not_a_mechanism(value: OptionValue) -> TypeError:
    """The error for an argument that is not a mechanism where a layer expects one."""
    expression = name_given(value)
    advice = "" if expression is None else f"; write mechanism={expression!r}"
    return TypeError(f"mechanism must be a text or a mechanism; found {value!r}{advice}")


def attribute_elsewhere(name: str) -> str:
    """The advice for an attribute that the package does not have; empty for unknown names."""
    elsewhere = mechanism_elsewhere(name)
    if elsewhere is not None:
        return f"; here it is pa.parse({elsewhere!r})"
    return nearest(in_our_spelling(name), registry.nameable())
