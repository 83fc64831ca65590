"""Where a kind of fault can change a result: what a mechanism looks at, from its leaves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import precondattn as pa
from precondattn.execution.cache_checks import keeps_tokens
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STAGES,
    STEP,
    STEP_BACKWARD,
    Change,
)

Named = Iterable[tuple[str, Change]]
"""Changes, and what each does."""


def stages_of(m: pa.Mechanism) -> tuple[str, ...]:
    """The methods that a backend needs for it.

    What looks into the future has no cache, and only states are differentiated.
    """
    has_states = bool(m.program.slots) and not keeps_tokens(m)
    found = {FORWARD, BACKWARD}
    if m.offers.causal:
        found |= {STEP, STEP_BACKWARD} if has_states else {STEP}
    return tuple(stage for stage in STAGES if stage in found)


def leaves(m: pa.Mechanism, *kinds: Any) -> list[Any]:
    """Its leaves, of some classes where any are given."""
    return [leaf for leaf in m.program.leaves if not kinds or isinstance(leaf, kinds)]


def attends(m: pa.Mechanism) -> bool:
    """Whether pairs of a query and a key are hidden by their positions.

    A recurrence has no positions: its order is the tokens'. Neither have leaves that treat each
    token alone, or all of them alike.
    """
    return bool(leaves(m, pa.Softmax, pa.Path, pa.QueryWeightedQuery))


def looks_at_other_tokens(m: pa.Mechanism) -> bool:
    """Whether a token's output depends on others."""
    return any(
        not isinstance(leaf, pa.TokenWise) or getattr(leaf, "axis", "") == "channel"
        for leaf in leaves(m)
    )


def knows_validity(m: pa.Mechanism) -> bool:
    """Whether a hidden token would be noticed, though its inputs come as zeros.

    A zero key has a weight, a reflection by β = 0 has none; retention fades with every token and
    CCQ counts it. For the other recurrences a token of zeros is nothing, unless a feature map in
    front of them makes something of it.
    """
    kinds = (pa.Softmax, pa.Path, pa.QueryWeightedQuery, pa.LucidSolve)
    if leaves(m, *kinds, pa.Retention, pa.ConditionedQuery):
        return True
    has_features = bool(leaves(m, pa.EluPlusOne, pa.HedgehogMap))
    return has_features and looks_at_other_tokens(m)


def reads_its_output(m: pa.Mechanism) -> bool:
    """Whether the gradient is written in terms of the output.

    The recurrences run again, and the norms are made again from their inputs: there a wrong output
    would change nothing.
    """
    kinds = (pa.Softmax, pa.Path, pa.LucidSolve, pa.EluPlusOne, pa.HedgehogMap, pa.Tempered)
    of_norm = (leaf for leaf in leaves(m, pa.UnitRows) if not leaf.detach)
    return any(True for _ in of_norm) or bool(leaves(m, *kinds, pa.ContractionGate))
