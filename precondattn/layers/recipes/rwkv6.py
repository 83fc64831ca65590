"""The layer of RWKV-6: rows of a token mixed with the one before, by weights of the token's own.

x' = x + (λ + B tanh(A (x + μ ∘ δ))) ∘ δ,  δ = x_{t−1} − x    for each row its own λ, A, B and μ
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from precondattn.arrays import Array, cast, namespace
from precondattn.layers.functions import linear, silu, upcast
from precondattn.layers.parameters import (
    FanIn,
    LogUniform,
    Parameter,
    linear_map,
    low_rank_maps,
)
from precondattn.layers.recipe import Recipe, RecipeTokens
from precondattn.layers.recipes.rwkv7 import MIX, HeadNorm


@dataclass(frozen=True)
class MixedByToken(Recipe):
    """W x', x' = x + (λ + B tanh(A (x + μ ∘ δ))) ∘ δ, δ = x_{t−1} − x, with A y of rank `rank`

    Source: RWKV-6 (arXiv 2404.05892), 4.2; flash-linear-attention, fla/layers/rwkv6.py. There, all
    rows of a token share one μ.
    """

    rank: int = 32

    def parameters(self) -> dict[str, Parameter]:
        return {
            **linear_map("x …"),
            "first_mix": MIX,
            "mix": MIX,
            "mix_down": Parameter(f"x {self.rank}", FanIn(), 1),
            "mix_up": Parameter(f"{self.rank} x", FanIn(), 1),
        }

    def history(self) -> int:
        return 1

    def history_shape(self) -> str:
        return "x"

    def mixed(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        """x' (b, t, x)."""
        x = tokens.x
        xp, one = namespace(x), namespace(p["mix"]).ones_like(p["mix"])[None, :]
        difference = xp.concat([one, -one], axis=0)
        delta = tokens.convolved(x, difference, None)
        low = xp.tanh(linear(x + p["first_mix"] * delta, p["mix_down"]))
        return x + (p["mix"] + linear(low, p["mix_up"])) * delta

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return linear(self.mixed(tokens, p), p["weight"])


@dataclass(frozen=True)
class DecayMixedByToken(MixedByToken):
    """−exp(D tanh(C x') + b), C x' of rank `decay_rank`, x' as that of a key

    Source: RWKV-6 (arXiv 2404.05892), 4.2; flash-linear-attention, fla/layers/rwkv6.py. b starts
    between −6 and −1, as in the public code, where it grows with the channel.
    """

    decay_rank: int = 64

    def parameters(self) -> dict[str, Parameter]:
        parameters = super().parameters()
        del parameters["weight"]
        start = LogUniform(math.exp(-6), math.exp(-1))
        return (
            parameters
            | low_rank_maps(str(self.decay_rank), bias=True)
            | {"bias": Parameter("…", start)}
        )

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        low = linear(self.mixed(tokens, p), p["down"])
        xp = namespace(low)
        score = upcast(linear(xp.tanh(low), p["up"], bias=p.get("bias")))
        return -xp.exp(xp.clip(score, max=80.0))  # Beyond, nothing is kept, and the gradient is 0.


@dataclass(frozen=True)
class GatedHeadNorm(HeadNorm):
    """(γ ∘ LayerNorm(o) + β) ∘ SiLU(y), head by head, ε = `eps` times the width, y the gate

    Source: RWKV-6 (arXiv 2404.05892), 4.2; public code, whose ε is 64e-5 for heads of width 64.
    There, keys and values have as many heads as queries; heads that share values share y.
    """

    reads: ClassVar[tuple[str, ...]] = ("out", "gate")

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        out, gate = self.normed(tokens, p), upcast(silu(tokens.values["gate"]))
        if gate.shape[2] != out.shape[2]:
            gate = namespace(gate).repeat(gate, out.shape[2] // gate.shape[2], axis=2)
        return cast(out * gate, tokens.x.dtype)
