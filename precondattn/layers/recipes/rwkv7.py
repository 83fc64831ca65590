"""The layer of RWKV-7: rows of a token mixed with the one before, and maps of low rank.

x' = x + μ ∘ (x_{t−1} − x)    for each row its own μ
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from precondattn.arrays import Array, cast, namespace, placement
from precondattn.layers.functions import layer_norm, linear, sigmoid, unit_rows, upcast
from precondattn.layers.parameters import Constant, Parameter, linear_map, low_rank_maps
from precondattn.layers.recipe import Recipe, RecipeTokens

RANK = 32
MIX = Parameter("x", Constant(0.5))
"""μ. The published layers begin with other numbers, by depth and channel."""


def mixed(tokens: RecipeTokens, weight: Array, mix: Array) -> Array:
    """W x' of rows (b, t, …), from W x and from W (μ ∘ x) of this token and the one before."""
    rows = linear(mix * tokens.x, weight)
    xp, shape = namespace(rows), (1, *rows.shape[2:])
    # A zero row with the sharding of the rows; there may be no rows.
    one = (
        xp.ones(shape, dtype=rows.dtype, **placement(rows))
        if 0 in rows.shape
        else xp.ones_like(rows[0, :1, ...])
    )
    difference = xp.concat([one, -one], axis=0)
    return linear(tokens.x, weight) + tokens.convolved(rows, difference, None)


@dataclass(frozen=True)
class Mixed(Recipe):
    """W x', x' = x + μ ∘ (x_{t−1} − x)

    Source: RWKV-7 (arXiv 2503.14456), 4; flash-linear-attention, fla/layers/rwkv7.py. For values,
    the first layer; later ones mix them with those of the first.
    """

    def parameters(self) -> dict[str, Parameter]:
        return {**linear_map("x …"), "mix": MIX}

    def history(self) -> int:
        return 1

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return mixed(tokens, p["weight"], p["mix"])


@dataclass(frozen=True)
class MixedLowRank(Recipe):
    """σ(B A x' + b), A x' of rank `rank`

    Source: RWKV-7 (arXiv 2503.14456), 4; flash-linear-attention, fla/layers/rwkv7.py.
    """

    rank: int = RANK

    def parameters(self) -> dict[str, Parameter]:
        return {**low_rank_maps(str(self.rank), bias=True), "mix": MIX}

    def history(self) -> int:
        return 1

    def history_shape(self) -> str:
        return str(self.rank)

    def activated(self, rows: Array) -> Array:
        """The rows between A and B."""
        return rows

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        rows = self.activated(mixed(tokens, p["down"], p["mix"]))
        return sigmoid(upcast(linear(rows, p["up"], bias=p.get("bias"))))


@dataclass(frozen=True)
class MixedDecay(MixedLowRank):
    """−e^{−1/2} σ(B tanh(A x') + b), A x' of rank `rank`

    Source: RWKV-7 (arXiv 2503.14456), 4; flash-linear-attention, fla/layers/rwkv7.py.
    """

    def activated(self, rows: Array) -> Array:
        return namespace(rows).tanh(rows)

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return -math.exp(-0.5) * super().make(tokens, p)


@dataclass(frozen=True)
class MixedGate(MixedLowRank):
    """B σ(A x'), A x' of rank `rank`

    Source: RWKV-7 (arXiv 2503.14456), 4; flash-linear-attention, fla/layers/rwkv7.py.
    """

    def parameters(self) -> dict[str, Parameter]:
        return {**low_rank_maps(str(self.rank)), "mix": MIX}

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        rows = mixed(tokens, p["down"], p["mix"])
        return linear(cast(sigmoid(upcast(rows)), rows.dtype), p["up"])


@dataclass(frozen=True)
class RemovalKey(Recipe):
    """κ = L2(γ ∘ y), y the key before its replacement

    Source: RWKV-7 (arXiv 2503.14456), 4; flash-linear-attention, fla/layers/rwkv7.py.
    """

    eps: float = 1e-6
    reads: ClassVar[tuple[str, ...]] = ("raw",)

    def parameters(self) -> dict[str, Parameter]:
        return {"gain": Parameter("…", Constant(0.85))}

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return unit_rows(p["gain"] * tokens.values["raw"], self.eps)


@dataclass(frozen=True)
class NegativeKey(Recipe):
    """−κ

    Source: RWKV-7 (arXiv 2503.14456), 4.
    """

    reads: ClassVar[tuple[str, ...]] = ("kappa",)

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return -tokens.values["kappa"]


@dataclass(frozen=True)
class ScaledKey(Recipe):
    """η ∘ κ

    Source: RWKV-7 (arXiv 2503.14456), 4.
    """

    reads: ClassVar[tuple[str, ...]] = ("kappa", "rate")

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        kappa = tokens.values["kappa"]
        return cast(tokens.values["rate"] * upcast(kappa), kappa.dtype)


@dataclass(frozen=True)
class ReplacementKey(Recipe):
    """y ∘ (1 + (η − 1) ∘ α)

    Source: RWKV-7 (arXiv 2503.14456), 4; flash-linear-attention, fla/layers/rwkv7.py.
    """

    reads: ClassVar[tuple[str, ...]] = ("raw", "rate")

    def parameters(self) -> dict[str, Parameter]:
        return {"alpha": Parameter("…", Constant(1))}

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        rows, rate = tokens.values["raw"], tokens.values["rate"]
        return cast(upcast(rows) * (1 + (rate - 1) * upcast(p["alpha"])), rows.dtype)


@dataclass(frozen=True)
class HeadNorm(Recipe):
    """γ ∘ LayerNorm(o) + β, head by head, ε = `eps` times the width

    Source: RWKV-7 (arXiv 2503.14456), 4; flash-linear-attention, fla/layers/rwkv7.py.
    """

    eps: float = 1e-5
    reads: ClassVar[tuple[str, ...]] = ("out",)

    def parameters(self) -> dict[str, Parameter]:
        return {"gain": Parameter("…", Constant(1)), "bias": Parameter("…", Constant(0))}

    def normed(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        """The result in float32."""
        out = upcast(tokens.values["out"])
        normed = layer_norm(out, self.eps * out.shape[-1])
        return upcast(p["gain"]) * normed + upcast(p["bias"])

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return cast(self.normed(tokens, p), tokens.x.dtype)


@dataclass(frozen=True)
class BonusGroupNorm(HeadNorm):
    """(γ ∘ LayerNorm(o) + β + (Σ r ∘ ρ ∘ k) v) ∘ g, head by head, ε = `eps` times the width

    Source: RWKV-7 (arXiv 2503.14456), 4; flash-linear-attention, fla/layers/rwkv7.py.
    """

    reads: ClassVar[tuple[str, ...]] = ("out", "q", "k", "v", "gate")

    def parameters(self) -> dict[str, Parameter]:
        return {**super().parameters(), "bonus": Parameter("h d", Constant(0))}

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        q, k, v, gate = (upcast(tokens.values[name]) for name in self.reads[1:])
        xp = namespace(q)
        bonus = xp.sum(q * upcast(p["bonus"]) * k, axis=-1, keepdims=True)
        if bonus.shape[2] != v.shape[2]:
            bonus = xp.repeat(bonus, v.shape[2] // bonus.shape[2], axis=2)
        return cast((self.normed(tokens, p) + bonus * v) * gate, tokens.x.dtype)
