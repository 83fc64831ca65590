"""The properties of a mechanism that preconditioners around it depend on."""

from __future__ import annotations

from typing import NamedTuple

from precondattn.algebra.options import OptionValue
from precondattn.algebra.registry import AnyMechanism


class Offers(NamedTuple):
    """The properties that a preconditioner reads from its base, and may refuse it for."""

    metric: OptionValue = None
    """The score function of a query and a key, which is linear in the key; None without one."""
    scale: float | None = None
    """The factor of the scores; None for d^{-1/2}."""
    causal: bool = True
    window: int | None = None
    read: str | None = None
    """`"mean"` if the output is a weighted mean of the values with non-negative weights."""
    row_axis: str = "token"
    """The axis that the rows of the attention matrix belong to, `"token"` or `"channel"`."""
    key_steps: tuple[tuple[str, AnyMechanism, tuple[tuple[str, str], ...]], ...] = ()
    """The `Step`s that change the key before the metric is applied; each reads `k`."""
    normalizes_query: bool = False
    """Whether the mechanism normalises its queries, so that their length does not matter."""
    paired: tuple[str, ...] = ()
    """The inputs of a second score map, on which the first map does not depend."""
    unit_rows: bool = False
    """Whether the rows of the output have length 1."""
    unit_keys: bool = False
    """Whether the mechanism diverges for keys longer than 1, like the delta rule."""
    several_keys: bool = False
    """Whether a token has several keys, along an additional axis."""
    decay: str | None = None
    """The decay of the state: `"head"` or `"channel"` for a gate g per head or key channel, or
    `"retention"` for a fixed factor per query head. None without decay."""
    sink: bool = False
    """Whether a sink takes some of the weight, so that the values' weights sum to less than 1."""
