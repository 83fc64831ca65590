"""Metrics: the score function ⟨q, k⟩ of a base, as an object that its preconditioners can use.

A metric is linear in the key. It has the scores of all pairs, their vjp, and a cached form: scores
of new queries against past and new keys, and how the cached keys advance. The frame says where
queries and keys stand; what may not be seen is masked by whoever asks for the scores.

    dot:            ⟨q, k⟩ = q·k
    transported:    ⟨q_i, k_j⟩ = q_iᵀ H_i … H_{j+1} k_j         (transported.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from precondattn.algebra.declaration import Inputs
from precondattn.algebra.flops import Flops, pair_flops
from precondattn.arrays import Array, namespace
from precondattn.cache import Append, Slot, Updates
from precondattn.frame import Frame
from precondattn.spec.array_functions import swap_time_and_heads, transpose

Extra = Mapping[str, Array]
"""A metric's own inputs, by name, with heads before time."""


class Metric(Protocol):
    """The score function of queries (b, h, t, d) and keys (b, h, s, d)."""

    @property
    def name(self) -> str:
        """How it stands in an expression."""
        ...

    inputs: ClassVar[Inputs]
    """What it reads besides q and k."""

    def slots(self) -> tuple[Slot, ...]:
        """The buffers it keeps; that of the keys is called `key`."""
        ...

    def scores(self, q: Array, k: Array, extra: Extra, frame: Frame) -> Array: ...

    def vjp(
        self, q: Array, k: Array, extra: Extra, frame: Frame, d_scores: Array
    ) -> tuple[Array, Array, dict[str, Array]]:
        """The gradients of q, k and the extra inputs; `d_scores` is 0 at hidden pairs."""
        ...

    def extended_scores(
        self, q: Array, past: Mapping[str, Array], k: Array, extra: Extra, frame: Frame
    ) -> Array:
        """New queries (b, h, t, d) against past keys and new ones: (b, h, t, c + t)."""
        ...

    def advance(self, past: Mapping[str, Array], k: Array, extra: Extra, frame: Frame) -> Updates:
        """The update of every slot; here the heads are those of the keys."""
        ...

    def flops(self, pairs: float, keys: int, d: int, e: int) -> Flops:
        """Scores and reads of one head, for `visible_pairs` and `visible_keys`."""
        ...


def cached_keys(metric: Metric, past: Mapping[str, Array]) -> dict[str, Array]:
    """The buffers of a metric among those of its leaf, with heads before time."""
    return {slot.name: swap_time_and_heads(past[slot.name]) for slot in metric.slots()}


@dataclass(frozen=True)
class Dot:
    """The dot product."""

    name: ClassVar[str] = "dot"
    inputs: ClassVar[Inputs] = Inputs()

    def slots(self) -> tuple[Slot, ...]:
        return (Slot("key", "{k}", "b c n d"),)

    def scores(self, q: Array, k: Array, extra: Extra, frame: Frame) -> Array:
        return q @ transpose(k)

    def vjp(
        self, q: Array, k: Array, extra: Extra, frame: Frame, d_scores: Array
    ) -> tuple[Array, Array, dict[str, Array]]:
        return d_scores @ k, transpose(d_scores) @ q, {}

    def extended_scores(
        self, q: Array, past: Mapping[str, Array], k: Array, extra: Extra, frame: Frame
    ) -> Array:
        keys = namespace(k).concat([past["key"], k], axis=2)
        return q @ transpose(keys)

    def advance(self, past: Mapping[str, Array], k: Array, extra: Extra, frame: Frame) -> Updates:
        return {"key": Append(swap_time_and_heads(k))}

    def flops(self, pairs: float, keys: int, d: int, e: int) -> Flops:
        return pair_flops(pairs, keys, d, e)


DOT = Dot()
