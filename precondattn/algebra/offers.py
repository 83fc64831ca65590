"""What a mechanism offers to the preconditioners around it."""

from __future__ import annotations

from typing import NamedTuple

from precondattn.algebra.options import OptionValue
from precondattn.algebra.registry import AnyMechanism


class Offers(NamedTuple):
    """The properties of a mechanism that a preconditioner around it can use."""

    metric: OptionValue = None
    """The score function of a query and a key, which is linear in the key; None without one."""
    scale: float | None = None
    """The factor of the scores; None means d^{-1/2}."""
    causal: bool = True
    window: int | None = None
    read: str | None = None
    """`"mean"` where the output is a mean of the values under non-negative weights."""
    row_axis: str = "token"
    """The axis of the rows of the attention matrix, `"token"` or `"channel"`."""
    key_steps: tuple[tuple[str, AnyMechanism, tuple[tuple[str, str], ...]], ...] = ()
    """What is done to the key before the metric is applied: `Step`s, each of which reads `k`."""
    normalizes_query: bool = False
    """Whether the mechanism normalises its queries, so that their length has no effect."""
    paired: tuple[str, ...] = ()
    """Inputs of a second score map, on which the first map does not depend."""
    unit_rows: bool = False
    """Whether the rows of the output have length 1."""
    unit_keys: bool = False
    """Whether keys longer than 1 make it diverge, as in the delta rule."""
    several_keys: bool = False
    """Whether a token has several keys, on an axis of their own."""
    decay: str | None = None
    """How the state decays: by a gate g per `"head"` or per key `"channel"`, or, for
    `"retention"`, by a fixed factor per query head. None without decay."""
    sink: bool = False
    """Whether a sink shortens every row of the output, by the weight that it takes."""
