"""Delta rules with an input `erase`, the key that they erase with.

    S_t = S'_t + β_t k_t (v_t − S'_tᵀ a_t)ᵀ,
    gdn2: S_t = S'_t + k_t (w_t ∘ v_t − S'_tᵀ (b_t ∘ a_t))ᵀ

with a_t the input `erase` and S'_t the decayed state. They are what `atk` makes of its base, whose
write key it changes and whose erase key stays k. The key that is written may be up to twice as
long, so that strengths are expected in [0, 1], half of the range of the rules without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra.declaration import Inputs, Pattern
from precondattn.arrays import Array, Arrays
from precondattn.frame import Frame
from precondattn.spec.array_functions import sum_heads, swap_time_and_heads
from precondattn.spec.gdn2 import GDN2
from precondattn.spec.linear_family import LinearFamily
from precondattn.spec.recurrence import Stream


class WithEraseKey(LinearFamily):
    """What the rules have in common."""

    role: ClassVar[str] = "piece"
    heads: ClassVar[str] = "u"
    is_delta: ClassVar[bool] = True

    @property
    def is_base(self) -> bool:
        return True

    @property
    def inputs(self) -> Inputs:
        declared = dict(super().inputs) | {"beta": Pattern.read(f"b s {self.heads} in [0, 1]")}
        return Inputs(**declared, erase=Pattern.read("b s h d unit row"))

    def erased(self, x: Mapping[str, Array], frame: Frame) -> Arrays:
        return {"erase": swap_time_and_heads(x["erase"])}

    def gradients(self, x: Mapping[str, Array], d: Stream, frame: Frame) -> Arrays:
        d_erase = sum_heads(d.erase, x["erase"].shape[2])
        return super().gradients(x, d, frame) | {"erase": swap_time_and_heads(d_erase)}


@dataclass(frozen=True)
class ErasingDelta(WithEraseKey):
    """The rule of `Delta`, with an erase key."""

    name: ClassVar[str] = "erasing_delta"


@dataclass(frozen=True)
class ErasingGatedDelta(WithEraseKey):
    """The rule of `GatedDelta`, with an erase key."""

    name: ClassVar[str] = "erasing_gated_delta"
    gate: ClassVar[str | None] = "head"


@dataclass(frozen=True)
class ErasingKDA(WithEraseKey):
    """The rule of `KDA`, with an erase key."""

    name: ClassVar[str] = "erasing_kda"
    gate: ClassVar[str | None] = "channel"


@dataclass(frozen=True)
class ErasingGDN2(GDN2):
    """The rule of `GDN2`, with an erase key, of which b says how much is erased."""

    name: ClassVar[str] = "erasing_gdn2"
    role: ClassVar[str] = "piece"
    variants: ClassVar[tuple[str, ...]] = ()
    erase_name: ClassVar[str] = "erase"

    @property
    def is_base(self) -> bool:
        return True

    @property
    def inputs(self) -> Inputs:
        declared = dict(super().inputs) | {"b": Pattern.read("b s u d in [0, 1]")}
        return Inputs(**declared, erase=Pattern.read("b s h d unit row"))
