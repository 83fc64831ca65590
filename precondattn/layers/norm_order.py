"""The order of norms with a gain and rotary embeddings in a layer: the norm comes first.

With RoPE, scores depend only on differences of positions, because rotations R_i satisfy

    ⟨R_i x, R_j y⟩ = ⟨x, R_{j−i} y⟩,    but    ⟨γ ∘ R_i x, γ' ∘ R_j y⟩ depends on i and on j.

A mechanism gets queries and keys that are already rotated, so its `qk_norm[gain=true]` would
multiply by γ after the rotation. A layer therefore computes the norm in the recipes of queries and
keys, and calls the mechanism without it. RMS and L2 norms without a gain commute with rotations,
and stay in the mechanism.

A layer leaves the norm in the mechanism if the recipes of the gains are given: `{"q_gain":
Learned(1.0), "k_gain": Learned(1.0)}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from precondattn.algebra.mechanism import Mechanism, Preconditioner
from precondattn.layers.meaning import changed_inside, meanings
from precondattn.layers.recipe import Recipe
from precondattn.layers.recipes import Learned, NormedRotary, Rotary, recipes_for
from precondattn.preconditioners.qk_norm import QKNorm
from precondattn.spec.norm import RowNorm


def norm_before_rotation(
    mechanism: Mechanism, recipes: Mapping[str, Recipe]
) -> tuple[Mechanism, dict[str, Recipe]]:
    """The mechanism that a layer calls, and the recipes that replace the published ones.

    Both are returned unchanged unless the mechanism has a norm with a gain of rotated rows.
    """
    norm = _norm_of(mechanism)
    inner = changed_inside(mechanism, lambda m: m.base if isinstance(m, QKNorm) else None)
    if norm is None or inner is None or recipes.keys() & gains(mechanism).keys():
        return mechanism, dict(recipes)
    inputs = meanings(inner.program)
    normed = {}
    for name in _arguments_of_norms(mechanism, "x"):
        rotation = recipes.get(name)
        if rotation is None and name in inputs:
            rotation = recipes_for(inputs[name].call.leaf).get(inputs[name].formal)
        if type(rotation) is not Rotary:
            return mechanism, dict(recipes)
        normed[name] = NormedRotary(**asdict(rotation), norm=norm.norm, eps=norm.eps)
    return inner, {**recipes, **normed}


def gains(mechanism: Mechanism) -> dict[str, Recipe]:
    """The recipes of the norms' gains, with which a layer leaves the norms in the mechanism."""
    return dict.fromkeys(_arguments_of_norms(mechanism, "gain"), Learned(1.0))


def _arguments_of_norms(mechanism: Mechanism, formal: str) -> list[str]:
    """The values that a mechanism's norms with a gain read as `formal`."""
    calls = mechanism.program.calls
    norms = [call for call in calls if isinstance(call.leaf, RowNorm) and call.leaf.gain]
    return [dict(call.arguments)[formal] for call in norms]


def _norm_of(mechanism: Mechanism) -> QKNorm | None:
    while isinstance(mechanism, Preconditioner) and not isinstance(mechanism, QKNorm):
        mechanism = mechanism.base
    return mechanism if isinstance(mechanism, QKNorm) and mechanism.gain else None
