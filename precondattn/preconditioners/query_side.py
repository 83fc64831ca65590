"""What preconditioners that change queries have in common: the bases they refuse."""

from __future__ import annotations

from precondattn.algebra.mechanism import Mechanism


def misses_second_map(name: str, base: Mechanism) -> str | None:
    """Why a base with two maps will not do for a preconditioner that knows of one."""
    if not base.offers.paired:
        return None
    other = ", ".join(base.offers.paired)
    return f"{name} would reach the first of two maps only, not {other}; put it inside"


def refuses_query_side(name: str, base: Mechanism) -> str | None:
    """Why a base will not do for a preconditioner that scales queries."""
    missed = misses_second_map(name, base)
    if missed is not None:
        return missed
    if base.offers.normalizes_query:
        return (
            f"the base normalises its queries, which divides out what {name} does to their length; "
            f"put it inside"
        )
    return None
