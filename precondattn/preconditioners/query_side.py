"""What preconditioners that change the query alone have in common: the bases they refuse."""

from __future__ import annotations

from precondattn.mechanism import Mechanism


def refuses_query_side(name: str, base: Mechanism) -> str | None:
    """Why a base will not do for a preconditioner that scales queries."""
    if base.offers.paired:
        other = ", ".join(base.offers.paired)
        return f"{name} would reach the first of two maps only, not {other}; put it inside"
    if base.offers.normalizes_query:
        return (
            f"the base normalises its queries, which divides out what {name} does to their length; "
            f"put it inside"
        )
    return None
