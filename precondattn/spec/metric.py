"""Metrics: the score function ⟨q, k⟩ of a base, as an object that its preconditioners can use.

A metric is linear in the key. It has the scores of all pairs, their vjp, and a cached form:
scores of new queries against past and new keys, and the past keys as they must be kept.

    dot:    ⟨q, k⟩ = q·k
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from precondattn.arrays import Array, namespace
from precondattn.declaration import Inputs
from precondattn.spec.array_functions import transpose


class Metric(Protocol):
    """The score function of queries (b, h, t, d) and keys (b, h, s, d)."""

    name: ClassVar[str]
    inputs: ClassVar[Inputs]
    """What it reads besides q and k; `extra` below holds these."""
    holds: ClassVar[str]
    """The value whose history a cache of its keys is, as a template of input names."""

    def scores(self, q: Array, k: Array, extra: Mapping[str, Array]) -> Array: ...

    def vjp(
        self, q: Array, k: Array, extra: Mapping[str, Array], d_scores: Array
    ) -> tuple[Array, Array, dict[str, Array]]: ...

    def extended_scores(
        self, q: Array, past: Array, k: Array, extra: Mapping[str, Array]
    ) -> Array: ...


@dataclass(frozen=True)
class Dot:
    """The dot product."""

    name: ClassVar[str] = "dot"
    inputs: ClassVar[Inputs] = Inputs()
    holds: ClassVar[str] = "{k}"

    def scores(self, q: Array, k: Array, extra: Mapping[str, Array]) -> Array:
        return q @ transpose(k)

    def vjp(
        self, q: Array, k: Array, extra: Mapping[str, Array], d_scores: Array
    ) -> tuple[Array, Array, dict[str, Array]]:
        return d_scores @ k, transpose(d_scores) @ q, {}

    def extended_scores(self, q: Array, past: Array, k: Array, extra: Mapping[str, Array]) -> Array:
        xp = namespace(q)
        return xp.concat([q @ transpose(past), q @ transpose(k)], axis=-1)


DOT = Dot()
