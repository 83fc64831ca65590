"""Options of mechanisms: dataclass fields that are checked at construction.

An option is a field declared by one of the functions below. It is checked when the mechanism is
constructed, so that every mechanism has valid options. Its kind also parses the option from the
text of an expression.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

from precondattn.arrays import is_finite_number

OptionValue = Any
"""What an option of a mechanism is set to."""


class HasOptions(Protocol):
    """A mechanism, or its class, as those see it that know its options."""

    name: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[OptionValue]]]


class OptionKind(NamedTuple):
    """The type of an option: what it accepts, and how it is parsed."""

    expected: str
    """A description of accepted settings, for the error message."""
    accept: Callable[[OptionValue], OptionValue]
    """Returns the setting in canonical form; raises ValueError for one that is not accepted."""
    read: Callable[[str], OptionValue]
    """Parses the setting from the text of an expression."""
    settings: tuple[OptionValue, ...] = ()
    """All accepted settings, where there are only a few."""


def option(default: OptionValue, kind: OptionKind) -> OptionValue:
    """A dataclass field for an option of this kind."""
    return dataclasses.field(default=default, metadata={"kind": kind})


def _reject(_: OptionValue) -> OptionValue:
    raise ValueError


def _flag(value: OptionValue) -> bool:
    return value if isinstance(value, bool) else _reject(value)


def _read_flag(text: str) -> OptionValue:
    return {"true": True, "false": False}.get(text, text)


def _python_number(value: OptionValue) -> OptionValue:
    """A NumPy scalar as a Python number; anything else unchanged."""
    return value.item() if type(value).__module__ == "numpy" and not value.shape else value


def _number(lowest: float, *, inclusive: bool) -> Callable[[OptionValue], float]:
    def accept(value: OptionValue) -> float:
        value = _python_number(value)
        if not is_finite_number(value) or value < lowest or (value == lowest and not inclusive):
            raise ValueError
        return float(value) + 0.0  # Turns −0.0 into 0.0, so that equal options have equal text.

    return accept


def _read_number(text: str) -> OptionValue:
    try:
        return float(text)
    except ValueError:
        return text


def _count(value: OptionValue, highest: int | None = None) -> int:
    value = _python_number(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError
    if highest is not None and value > highest:
        raise ValueError
    return value


def _read_count(text: str) -> OptionValue:
    try:
        return int(text)
    except ValueError:
        return text


def _or_none(kind: OptionKind) -> OptionKind:
    return OptionKind(
        f"{kind.expected}, or None",
        lambda value: None if value is None else kind.accept(value),
        lambda text: None if text == "none" else kind.read(text),
    )


def flag(default: bool) -> OptionValue:
    """True or False."""
    return option(default, OptionKind("true or false", _flag, _read_flag, (True, False)))


def number(default: float) -> OptionValue:
    """A finite number."""
    return option(
        default, OptionKind("a finite number", _number(-math.inf, inclusive=True), _read_number)
    )


def positive_or_none(default: float | None = None) -> OptionValue:
    """A finite number above 0, or None."""
    return option(default, _or_none(positive(1.0).metadata["kind"]))


def positive(default: float) -> OptionValue:
    """A finite number above 0."""
    kind = OptionKind("a finite number above 0", _number(0.0, inclusive=False), _read_number)
    return option(default, kind)


def non_negative(default: float) -> OptionValue:
    """A finite number, 0 or above."""
    kind = OptionKind("a finite number, 0 or above", _number(0.0, inclusive=True), _read_number)
    return option(default, kind)


def count(default: int, highest: int | None = None) -> OptionValue:
    """A whole number, 1 or above, and at most `highest` if that is given."""
    expected = f"a whole number, {'1 or above' if highest is None else f'1 to {highest}'}"
    return option(default, OptionKind(expected, partial(_count, highest=highest), _read_count))


def count_or_none(default: int | None = None) -> OptionValue:
    """A whole number, 1 or above, or None."""
    return option(default, _or_none(OptionKind("a whole number, 1 or above", _count, _read_count)))


def _few_counts(lowest: int) -> OptionKind:
    def accept(value: OptionValue) -> tuple[int, ...]:
        numbers = value if isinstance(value, tuple | list) else (value,)
        numbers = [_python_number(number) for number in numbers]
        are_counts = all(
            isinstance(n, int) and not isinstance(n, bool) and lowest <= n <= LONGEST
            for n in numbers
        )
        return tuple(numbers) if are_counts and len(numbers) in (1, 2) else _reject(value)

    def read(text: str) -> OptionValue:
        words = text.split("/")
        return tuple(map(int, words)) if all(map(str.isdecimal, words)) else text

    return OptionKind(
        f"a whole number, {lowest} or above, or two of them such as 7/8", accept, read
    )


def counts(default: tuple[int, ...]) -> OptionValue:
    """One or two whole numbers, 1 or above, separated by a slash in an expression: `7/8`."""
    return option(default, _few_counts(1))


def counts_or_none() -> OptionValue:
    """One or two whole numbers, 1 or above, or None."""
    return option(None, _or_none(_few_counts(1)))


def non_negative_counts(default: tuple[int, ...]) -> OptionValue:
    """One or two whole numbers, 0 or above."""
    return option(default, _few_counts(0))


LONGEST = 2**30
"""No sequence is longer. Differences and sums of two positions or windows then fit in int32."""


def window_or_none() -> OptionValue:
    """A whole number of tokens, 1 or above, or None. A window above every sequence is None."""
    kind = _or_none(count(1).metadata["kind"])

    def accept(value: OptionValue) -> int | None:
        tokens: int | None = kind.accept(value)
        return None if tokens is None or tokens > LONGEST else tokens

    return option(None, kind._replace(accept=accept))


def choice(default: str, *others: str) -> OptionValue:
    """One of the given words."""
    words = (default, *others)

    def accept(value: OptionValue) -> str:
        return value if isinstance(value, str) and value in words else str(_reject(value))

    return option(default, OptionKind("one of " + ", ".join(map(repr, words)), accept, str, words))


def one_of(default: OptionValue, *others: OptionValue) -> OptionValue:
    """One of the given frozen objects; the option may be given as the object's `name`."""
    objects = {each.name: each for each in (default, *others)}

    def accept(value: OptionValue) -> OptionValue:
        value = objects.get(value, value) if isinstance(value, str) else value
        return value if value in objects.values() else _reject(value)

    expected = "one of " + ", ".join(objects)
    return option(
        default,
        OptionKind(expected, accept, lambda text: objects.get(text, text), tuple(objects.values())),
    )


def names(default: tuple[str, ...]) -> OptionValue:
    """One or more different names, separated by slashes in an expression: `q/k`."""

    def accept(value: OptionValue) -> tuple[str, ...]:
        value = tuple(value.split("/")) if isinstance(value, str) else value
        are_names = isinstance(value, tuple | list) and all(
            isinstance(name, str) and name.isidentifier() for name in value
        )
        is_valid = are_names and value and len(set(value)) == len(value)
        return tuple(value) if is_valid else _reject(value)

    return option(default, OptionKind("different names, such as q/k", accept, str))


def fields_of(
    mechanism: HasOptions | type[HasOptions],
) -> dict[str, dataclasses.Field[OptionValue]]:
    """The option fields of a mechanism or a mechanism class, by name."""
    return {f.name: f for f in dataclasses.fields(mechanism) if "kind" in f.metadata}


def check_options(mechanism: HasOptions) -> None:
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
"""Characters of a setting that a message shows."""


def _shown(value: OptionValue) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits.
        return "a larger number"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def text_of(value: OptionValue) -> str:
    """An option's text in an expression; the inverse of `OptionKind.read`."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return str(getattr(value, "name", value))
