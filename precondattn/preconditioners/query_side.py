"""Reasons why preconditioners that change queries refuse a base."""

from __future__ import annotations

from precondattn.algebra.mechanism import Mechanism


def misses_second_map(name: str, base: Mechanism) -> str | None:
    """The reason to refuse a base with two score maps; None if it has one."""
    if not base.offers.paired:
        return None
    other = ", ".join(base.offers.paired)
    return f"{name} would reach the first of two maps only, not {other}"


def refuses_keys(name: str, base: Mechanism) -> str | None:
    """The reason why a preconditioner that reads or changes keys refuses a base, or None."""
    several = f"a token of the base has several keys, and {name} has one"
    return misses_second_map(name, base) or (several if base.offers.several_keys else None)


def refuses_query_side(name: str, base: Mechanism) -> str | None:
    """The reason why a preconditioner that scales queries refuses a base, or None."""
    missed = misses_second_map(name, base)
    if missed is not None:
        return missed
    if base.offers.normalizes_query:
        return (
            f"the base normalises its queries, which divides out what {name} does to their length"
        )
    return None
