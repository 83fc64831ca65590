"""Options of mechanisms: dataclass fields that are checked when a mechanism is constructed.

An option is a field declared by one of the functions below. The kind of an option checks it, and
parses it from the text of an expression.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from precondattn.algebra.registry import Registered
from precondattn.arrays import is_finite_number
from precondattn.given import whole_number

OptionValue = Any


class OptionKind(NamedTuple):
    """The kind of an option: which settings it accepts, and how it is parsed."""

    expected: str
    """A description of accepted settings, for the error message."""
    accept: Callable[[OptionValue], OptionValue]
    """A function that returns a setting in canonical form, or raises a ValueError."""
    read: Callable[[str], OptionValue]
    """A function that parses a setting from the text of an expression."""
    settings: tuple[OptionValue, ...] = ()


def option(default: OptionValue, kind: OptionKind) -> OptionValue:
    """A dataclass field for an option of this kind."""
    return dataclasses.field(default=default, metadata={"kind": kind})


def _accepted(value: OptionValue, is_valid: object) -> OptionValue:
    if not is_valid:
        raise ValueError
    return value


def _read_as(convert: Callable[[str], OptionValue], text: str) -> OptionValue:
    try:
        return convert(text)
    except ValueError:
        return text


def _number(expected: str, is_in_range: Callable[[float], bool]) -> OptionKind:
    def accept(value: OptionValue) -> float:
        if type(value).__module__ == "numpy" and not value.shape:
            value = value.item()
        is_valid = is_finite_number(value) and is_in_range(value)
        # Adding 0.0 turns −0.0 into 0.0, so that equal options have equal text.
        return float(_accepted(value, is_valid)) + 0.0

    return OptionKind(expected, accept, partial(_read_as, float))


def _accepted_count(value: OptionValue, lowest: int, highest: int | None) -> OptionValue:
    number = whole_number(value)
    if number is None or number < lowest or (highest is not None and number > highest):
        raise ValueError
    return number


def _count(highest: int | None = None) -> OptionKind:
    expected = f"a whole number, {'1 or above' if highest is None else f'1 to {highest}'}"
    accept = partial(_accepted_count, lowest=1, highest=highest)
    return OptionKind(expected, accept, partial(_read_as, int))


def _or_none(kind: OptionKind) -> OptionKind:
    return OptionKind(
        f"{kind.expected}, or None",
        lambda value: None if value is None else kind.accept(value),
        lambda text: None if text == "none" else kind.read(text),
    )


_POSITIVE = _number("a finite number above 0", lambda value: value > 0)


def flag(default: bool) -> OptionValue:
    """An option that is True or False."""
    settings = {"true": True, "false": False}
    kind = OptionKind(
        "true or false",
        lambda value: _accepted(value, isinstance(value, bool)),
        lambda text: settings.get(text, text),
        tuple(settings.values()),
    )
    return option(default, kind)


def number(default: float) -> OptionValue:
    """An option that is a finite number."""
    return option(default, _number("a finite number", lambda value: True))


def positive(default: float) -> OptionValue:
    """An option that is a finite number above 0."""
    return option(default, _POSITIVE)


def positive_or_none(default: float | None = None) -> OptionValue:
    """An option that is a finite number above 0, or None."""
    return option(default, _or_none(_POSITIVE))


def non_negative(default: float) -> OptionValue:
    """An option that is a finite number, 0 or above."""
    return option(default, _number("a finite number, 0 or above", lambda value: value >= 0))


def count(default: int, highest: int | None = None) -> OptionValue:
    """An option that is an integer, 1 or above, and at most `highest` if that is given."""
    return option(default, _count(highest))


def count_or_none(default: int | None = None) -> OptionValue:
    """An option that is an integer, 1 or above, or None."""
    return option(default, _or_none(_count()))


def counts(default: tuple[int, ...] | None, lowest: int = 1) -> OptionValue:
    """An option that is one or two integers, separated by a slash in an expression: `7/8`.

    None is accepted if it is the default.
    """

    def accept(value: OptionValue) -> tuple[int, ...]:
        each_axis = value if isinstance(value, tuple | list) else (value,)
        numbers = tuple(_accepted_count(number, lowest, LONGEST) for number in each_axis)
        return tuple(_accepted(numbers, len(numbers) in (1, 2)))

    def read(text: str) -> OptionValue:
        words = text.split("/")
        return tuple(map(int, words)) if all(map(str.isdecimal, words)) else text

    expected = f"a whole number, {lowest} or above, or two of them such as 7/8"
    kind = OptionKind(expected, accept, read)
    return option(default, _or_none(kind) if default is None else kind)


LONGEST = 2**30
"""The largest length of a sequence; sums and differences of two positions fit in int32."""


def window_or_none() -> OptionValue:
    """An option that is a number of tokens, 1 or above, or None; None above `LONGEST`."""
    kind = _or_none(_count())

    def accept(value: OptionValue) -> int | None:
        tokens: int | None = kind.accept(value)
        return None if tokens is None or tokens > LONGEST else tokens

    return option(None, kind._replace(accept=accept))


def choice(default: str, *others: str) -> OptionValue:
    """An option that is one of the given words."""
    words = (default, *others)

    def accept(value: OptionValue) -> OptionValue:
        return _accepted(value, isinstance(value, str) and value in words)

    return option(default, OptionKind("one of " + ", ".join(map(repr, words)), accept, str, words))


def one_of(default: OptionValue, *others: OptionValue) -> OptionValue:
    """An option that is one of the given frozen objects, also given as the object's `name`."""
    objects = {each.name: each for each in (default, *others)}

    def accept(value: OptionValue) -> OptionValue:
        value = read(value) if isinstance(value, str) else value
        return _accepted(value, value in objects.values())

    def read(text: str) -> OptionValue:
        return objects.get(text, text)

    kind = OptionKind("one of " + ", ".join(objects), accept, read, tuple(objects.values()))
    return option(default, kind)


def names(default: tuple[str, ...]) -> OptionValue:
    """An option that is one or more different names, separated by slashes in text: `q/k`."""

    def accept(value: OptionValue) -> tuple[str, ...]:
        value = tuple(value.split("/")) if isinstance(value, str) else value
        are_names = isinstance(value, tuple | list) and all(
            isinstance(name, str) and name.isidentifier() for name in value
        )
        return tuple(_accepted(value, are_names and value and len(set(value)) == len(value)))

    return option(default, OptionKind("different names, such as q/k", accept, str))


def fields_of(mechanism: Registered | type[Registered]) -> dict[str, dataclasses.Field[Any]]:
    """The option fields of a mechanism or a mechanism class, by name."""
    return {f.name: f for f in dataclasses.fields(mechanism) if "kind" in f.metadata}


def check_options(mechanism: Registered) -> None:
    """Convert every option to canonical form, or raise a ValueError that names it."""
    for name, field in fields_of(mechanism).items():
        kind: OptionKind = field.metadata["kind"]
        value = getattr(mechanism, name)
        try:
            canonical = kind.accept(value)
        except ValueError:
            message = f"{mechanism.name}: option {name} must be {kind.expected}; found "
            raise ValueError(message + _shown(value)) from None
        object.__setattr__(mechanism, name, canonical)


SHOWN = 200
"""The most characters of a setting that a message shows."""


def _shown(value: OptionValue) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits.
        return "a larger number"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def text_of(value: OptionValue) -> str:
    """An option's text in an expression; the inverse of `OptionKind.read`."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return str(getattr(value, "name", value))
