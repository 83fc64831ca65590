"""Expressions that differ from a mechanism in one option, or in two at once.

    softmax   →   softmax[window=3], softmax[bias=true], …      options_of
                  softmax[window=3,bias=true], …                together

The options are those of the class's `variants` and, inside a composition, of its base's variants. A
scale and an eps are added to a leaf if no variant changes them. A window has a second variant that
is wider than a block. Two options are not combined if they exclude each other or the mechanism
refuses both together.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import precondattn as pa
from precondattn_conformance.declared import mechanism_of

WIDE = 10**6
"""Placeholder for a window wider than a block, until the block is known."""

USUAL = {"scale": 0.3, "eps": 0.5}
"""Options that a kernel easily ignores, added to leaves that have them but no variant with them."""

BEYOND = 6
"""The number of tokens by which a wide window exceeds a block."""


@cache
def options_of(expression: str) -> tuple[str, ...]:
    """Expressions that differ from a mechanism in one option."""
    plain = mechanism_of(expression)
    changed = [*map(pa.parse, type(plain).variants), *_with_variants_of_base(plain)]
    changed = [m for m in changed if type(m) is type(plain) and _changes(m, plain) == 1]
    options = _options(plain)
    varied = {n for m in changed for n, value in _options(m).items() if value != options[n]}
    if "base" not in options:  # A leaf has options that no variant changes.
        usual = [name for name in USUAL if name in options and name not in varied]
        changed += filter(None, (_replaced(plain, **{name: USUAL[name]}) for name in usual))
    wide = [m for m in map(_with_wide_window, changed) if m is not None]
    return tuple(dict.fromkeys(map(str, (*changed, *wide))))


@cache
def inner_eps_of(expression: str) -> tuple[str, ...]:
    """Expressions that differ from a composition in the eps of its inner piece."""
    return tuple(map(str, _with_variants_of_base(mechanism_of(expression), "[eps=")))


@cache
def together(expression: str, one: str, other: str) -> str | None:
    """The expression with both options; None if they can not be combined."""
    merged = None if one == other else _merged(*map(mechanism_of, (expression, one, other)))
    return None if merged is None or str(merged) in (one, other) else str(merged)


def at_block(expression: str, block: int) -> str:
    """The expression with its wide window, if any, set to a few tokens more than a block."""
    return expression.replace(f"window={WIDE}", f"window={block + BEYOND}")


def _options(m: pa.Mechanism) -> dict[str, object]:
    return {field.name: getattr(m, field.name) for field in dataclasses.fields(m)}


def _with_variants_of_base(plain: pa.Mechanism, part: str = "") -> list[pa.Mechanism]:
    """A composition with each variant of its base that contains this text."""
    base = getattr(plain, "base", None)
    variants = () if base is None else type(base).variants
    changed = (_replaced(plain, base=pa.parse(text)) for text in variants if part in text)
    return [m for m in changed if m is not None]


def _changes(m: pa.Mechanism, plain: pa.Mechanism) -> int:
    """The number of options in which two mechanisms differ, inner ones included."""
    if type(m) is not type(plain):
        return 1
    pairs = zip(_options(m).values(), _options(plain).values(), strict=True)
    changed = [(value, default) for value, default in pairs if value != default]
    inner = [(a, b) for a, b in changed if isinstance(a, pa.Mechanism) and isinstance(b, type(a))]
    return len(changed) - len(inner) + sum(_changes(a, b) for a, b in inner)


def _with_wide_window(m: pa.Mechanism) -> pa.Mechanism | None:
    if getattr(m, "window", None) is not None:
        return _replaced(m, window=WIDE)
    base = getattr(m, "base", None)
    wide = None if base is None else _with_wide_window(base)
    return None if wide is None else _replaced(m, base=wide)


def _replaced(m: pa.Mechanism, /, **changes: object) -> pa.Mechanism | None:
    """The mechanism with other options; None if it refuses them."""
    try:
        return dataclasses.replace(m, **changes)
    except (TypeError, ValueError):
        return None


def _merged(plain: pa.Mechanism, one: pa.Mechanism, other: pa.Mechanism) -> pa.Mechanism | None:
    changes: dict[str, object] = {}
    for name, default in _options(plain).items():
        value, second = getattr(one, name), getattr(other, name)
        if default not in (value, second) and value != second:
            if not isinstance(value, pa.Mechanism) or not (
                type(value) is type(second) is type(default)
            ):
                return None
            changes[name] = _merged(default, value, second)
            if changes[name] is None:
                return None
        else:
            changes[name] = second if value == default else value
    return _replaced(plain, **changes)
