"""Metrics: the score function ⟨q, k⟩ of a base, as an object that its preconditioners can use.

A metric is linear in the key. It computes the scores of all pairs, or in a step of a cache those of
new queries with past and new keys; the vjp; and the update of the cached keys. The frame has the
positions and segments of queries and keys; the caller masks the scores.

    dot:            ⟨q, k⟩ = q·k
    transported:    ⟨q_i, k_j⟩ = q_iᵀ H_i … H_{j+1} k_j         (transported.py)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from precondattn.algebra.declaration import Inputs
from precondattn.algebra.flops import Flops, pair_flops
from precondattn.arrays import Array, ByName, namespace
from precondattn.cache import Append, Slot, Updates
from precondattn.frame import Frame
from precondattn.spec.array_functions import swap_time_and_heads, transpose

Extra = ByName
"""A metric's own inputs, by name, with heads before time."""


class Metric(Protocol):
    """The score function of queries (b, h, t, d) and keys (b, h, s, d)."""

    @property
    def name(self) -> str:
        """Its text in an expression."""
        ...

    inputs: ClassVar[Inputs]
    """Its inputs besides q and k."""

    def slots(self) -> tuple[Slot, ...]:
        """Its cache buffers; the one of the keys is named `key`."""
        ...

    def scores(
        self, q: Array, k: Array, extra: Extra, frame: Frame, past: ByName | None = None
    ) -> Array:
        """The scores (b, h, t, s); of new queries against past and new keys (b, h, t, c + t)."""
        ...

    def vjp(
        self, q: Array, k: Array, extra: Extra, frame: Frame, d_scores: Array
    ) -> tuple[Array, Array, dict[str, Array]]:
        """The gradients of q, k and the extra inputs; `d_scores` is 0 at masked pairs."""
        ...

    def advance(self, past: ByName, k: Array, extra: Extra, frame: Frame) -> Updates:
        """The update of every slot; all arrays have the heads of the keys."""
        ...

    def flops(self, pairs: float, keys: int, d: int, e: int) -> Flops:
        """Scores and reads of one head, for `visible_pairs` and `visible_keys`."""
        ...


def cached_keys(metric: Metric, past: ByName) -> dict[str, Array]:
    """The buffers of a metric among those of its leaf, with heads before time."""
    return {slot.name: swap_time_and_heads(past[slot.name]) for slot in metric.slots()}


@dataclass(frozen=True)
class Dot:
    """The dot product."""

    name: ClassVar[str] = "dot"
    inputs: ClassVar[Inputs] = Inputs()

    def slots(self) -> tuple[Slot, ...]:
        return (Slot("key", "{k}", "b c n d"),)

    def scores(
        self, q: Array, k: Array, extra: Extra, frame: Frame, past: ByName | None = None
    ) -> Array:
        keys = k if past is None else namespace(k).concat([past["key"], k], axis=2)
        return q @ transpose(keys)

    def vjp(
        self, q: Array, k: Array, extra: Extra, frame: Frame, d_scores: Array
    ) -> tuple[Array, Array, dict[str, Array]]:
        return d_scores @ k, transpose(d_scores) @ q, {}

    def advance(self, past: ByName, k: Array, extra: Extra, frame: Frame) -> Updates:
        return {"key": Append(swap_time_and_heads(k))}

    def flops(self, pairs: float, keys: int, d: int, e: int) -> Flops:
        return pair_flops(pairs, keys, d, e)


DOT = Dot()
