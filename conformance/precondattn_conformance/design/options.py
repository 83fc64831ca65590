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
    found = [pa.parse(text) for text in type(plain).variants]
    base = getattr(plain, "base", None)
    if base is not None:
        for text in type(base).variants:
            changed = _replaced(plain, base=pa.parse(text))
            if changed is not None:
                found.append(changed)
    found = [m for m in found if type(m) is type(plain) and _changes(m, plain) == 1]
    found += [m for m in _unvaried(plain, found) if m is not None]
    wide = [m for m in map(_with_wide_window, found) if m is not None]
    return tuple(dict.fromkeys(str(m) for m in (*found, *wide)))


@cache
def inner_eps_of(expression: str) -> tuple[str, ...]:
    """Expressions that differ from a composition in the eps of its inner piece."""
    plain = mechanism_of(expression)
    base: pa.Mechanism | None = getattr(plain, "base", None)
    if base is None:
        return ()
    changed = [
        _replaced(plain, base=pa.parse(text))
        for text in type(base).variants
        if f"{base.name}[eps=" in text
    ]
    return tuple(str(m) for m in changed if m is not None)


@cache
def together(expression: str, one: str, other: str) -> str | None:
    """The expression with both options; None if they can not be combined."""
    if one == other:
        return None
    plain, *given = map(mechanism_of, (expression, one, other))
    merged = _merged(plain, *given)
    return None if merged is None or str(merged) in (one, other) else str(merged)


def at_block(expression: str, block: int) -> str:
    """The expression with its wide window, if any, set to a few tokens more than a block."""
    return expression.replace(f"window={WIDE}", f"window={block + BEYOND}")


def _fields(m: pa.Mechanism) -> list[str]:
    return [field.name for field in dataclasses.fields(m)]


def _changes(m: pa.Mechanism, plain: pa.Mechanism) -> int:
    """The number of options in which two mechanisms differ, inner ones included."""
    if type(m) is not type(plain):
        return 1
    count = 0
    for name in _fields(m):
        value, default = getattr(m, name), getattr(plain, name)
        if value != default:
            count += _changes(value, default) if isinstance(value, pa.Mechanism) else 1
    return count


def _unvaried(plain: pa.Mechanism, found: list[pa.Mechanism]) -> list[pa.Mechanism | None]:
    """A leaf with each option of `USUAL` that it has and no variant changes."""
    if "base" in _fields(plain):
        return []
    return [
        _replaced(plain, **{name: value})
        for name, value in USUAL.items()
        if name in _fields(plain) and all(getattr(m, name) == getattr(plain, name) for m in found)
    ]


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
    changes = {}
    for name in _fields(plain):
        default, first, second = (getattr(m, name) for m in (plain, one, other))
        if second in (default, first):
            changes[name] = first
        elif first == default:
            changes[name] = second
        elif isinstance(first, pa.Mechanism) and type(first) is type(second) is type(default):
            changes[name] = _merged(default, first, second)
            if changes[name] is None:
                return None
        else:
            return None
    return _replaced(plain, **changes)
