"""Functions that decide from a mechanism's leaves whether a kind of fault can change a result."""

from __future__ import annotations

from collections.abc import Iterable

import precondattn as pa
from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.algebra.piece import Piece
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
"""Changes with short descriptions."""


def stages_of(m: Piece) -> tuple[str, ...]:
    """The methods that a backend needs for a mechanism.

    A mechanism that is not causal has no cache, and among caches only states have gradients.
    """
    has_states = bool(m.program.slots) and not keeps_tokens(m)
    needed = {FORWARD, BACKWARD}
    if m.offers.causal:
        needed |= {STEP, STEP_BACKWARD} if has_states else {STEP}
    return tuple(stage for stage in STAGES if stage in needed)


def leaves(m: Piece, *kinds: type) -> list[LeafProtocol]:
    """The mechanism's leaves, or those of the given classes."""
    return [leaf for leaf in m.program.leaves if not kinds or isinstance(leaf, kinds)]


def looks_at_other_tokens(m: Piece) -> bool:
    """Whether a token's output depends on other tokens."""
    return any(
        not isinstance(leaf, pa.TokenWise) or getattr(leaf, "axis", "") == "channel"
        for leaf in leaves(m)
    )


def depends_on_validity(m: Piece) -> bool:
    """Whether an invalid token changes the result although its inputs are zeros.

    In softmax a zero key has a weight; retention decays with every token, and CCQ counts every
    token. For the other recurrences a token of zeros has no effect, unless a feature map precedes
    them.
    """
    kinds = (pa.Softmax, pa.Path, pa.QueryWeightedQuery, pa.LucidSolve)
    if leaves(m, *kinds, pa.Retention, pa.ConditionedQuery):
        return True
    has_features = bool(leaves(m, pa.EluPlusOne, pa.HedgehogMap))
    return has_features and looks_at_other_tokens(m)


def reads_its_output(m: Piece) -> bool:
    """Whether the gradient is computed from the output.

    Recurrences and norms are recomputed from their inputs; there a wrong output changes nothing.
    """
    kinds = (pa.Softmax, pa.Path, pa.LucidSolve, pa.EluPlusOne, pa.HedgehogMap, pa.Tempered)
    has_norm = any(isinstance(leaf, pa.UnitRows) and not leaf.detach for leaf in m.program.leaves)
    return has_norm or bool(leaves(m, *kinds, pa.ContractionGate))
