"""Common mistakes in pieces of the blocked algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from precondattn.spec.array_functions import identity_like


def without_tail(true: Any) -> Any:
    """`blocks` without the last block, if that is shorter than the others."""

    def blocks(count: int, size: int) -> Iterator[tuple[int, int]]:
        for start, stop in true(count, size):
            if stop - start == size or not start:
                yield start, stop

    return blocks


def first_order(ops: Any, strict: Any, out: Any = None) -> Any:
    """I − L in place of (I + L)⁻¹."""
    return identity_like(strict) - strict


def half_by_half(true: Any) -> Any:
    """[[A⁻¹, 0], [0, B⁻¹]] in place of the inverse of [[A, 0], [C, B]]."""

    def unit_lower_inverse(ops: Any, strict: Any, out: Any = None) -> Any:
        inverse, half = true(ops, strict, out), strict.shape[-1] // 2
        inverse[..., half:, :half] = 0
        return inverse

    return unit_lower_inverse


def changed_after(true: Any, **values: Any) -> Any:
    """An `__init__` that then changes some attributes."""

    def changed(self: Any, *given: Any, **named: Any) -> None:
        true(self, *given, **named)
        for name, value in values.items():
            setattr(self, name, value(self) if callable(value) else value)

    return changed
