"""Pieces of the blocked algorithms as they are often wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from precondattn.spec.array_functions import identity_like


def without_tail(true: Any) -> Any:
    """`blocks`, without a last one that is shorter than the others."""

    def blocks(count: int, size: int) -> Iterator[tuple[int, int]]:
        for start, stop in true(count, size):
            if stop - start == size or not start:
                yield start, stop

    return blocks


def first_order(ops: Any, strict: Any, out: Any = None) -> Any:
    """I − L for (I + L)⁻¹."""
    return identity_like(strict) - strict


def half_by_half(true: Any) -> Any:
    """[[A⁻¹, 0], [0, B⁻¹]] for the inverse of [[A, 0], [C, B]]."""

    def unit_lower_inverse(ops: Any, strict: Any, out: Any = None) -> Any:
        found, half = true(ops, strict, out), strict.shape[-1] // 2
        found[..., half:, :half] = 0
        return found

    return unit_lower_inverse


def changed_after(true: Any, **values: Any) -> Any:
    """`__init__`, after which some attributes have other values."""

    def made(self: Any, *given: Any, **named: Any) -> None:
        true(self, *given, **named)
        for name, value in values.items():
            setattr(self, name, value(self) if callable(value) else value)

    return made
