"""Delta rules with an input `erase`, the key that they erase with.

    S_t = S'_t + β_t k_t (v_t − S'_tᵀ a_t)ᵀ,
    gdn2: S_t = S'_t + k_t (w_t ∘ v_t − S'_tᵀ (b_t ∘ a_t))ᵀ

with a_t the input `erase` and S'_t the decayed state. They are what `atk` makes of its base, whose
write key it changes and whose erase key stays k. The key that is written may be up to twice as
long, so that strengths are expected in [0, 1], half of the range of the rules without it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from precondattn.spec.delta import KDA, Delta, GatedDelta
from precondattn.spec.gdn2 import GDN2
from precondattn.spec.linear_family import LinearFamily


class WithEraseKey(LinearFamily):
    """The base class of delta rules with an input `erase`."""

    role: ClassVar[str] = "piece"

    is_base = True


@dataclass(frozen=True)
class ErasingDelta(WithEraseKey):
    """The rule of `Delta`, with an erase key."""

    name: ClassVar[str] = "erasing_delta"
    declares = replace(Delta.declares, erase="own key")


@dataclass(frozen=True)
class ErasingGatedDelta(WithEraseKey):
    """The rule of `GatedDelta`, with an erase key."""

    name: ClassVar[str] = "erasing_gated_delta"
    declares = replace(GatedDelta.declares, erase="own key")


@dataclass(frozen=True)
class ErasingKDA(WithEraseKey):
    """The rule of `KDA`, with an erase key."""

    name: ClassVar[str] = "erasing_kda"
    declares = replace(KDA.declares, erase="own key")


@dataclass(frozen=True)
class ErasingGDN2(WithEraseKey, GDN2):
    """The rule of `GDN2`, with an erase key, of which b says how much is erased."""

    name: ClassVar[str] = "erasing_gdn2"
    variants: ClassVar[tuple[str, ...]] = ()
    declares = replace(GDN2.declares, erase="own key")
