"""What happens to the output o of a mechanism before the last projection: norms and gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from precondattn.arrays import Array, cast, namespace
from precondattn.layers.functions import linear, rms_norm, sigmoid, silu, upcast
from precondattn.layers.parameters import Constant, FanIn, Parameter, low_rank_maps
from precondattn.layers.recipe import Recipe, RecipeTokens

AFTER_PROJECTION = "projection_bias"
"""The parameter of an output's recipe that the layer adds to y."""


@dataclass(frozen=True)
class Unchanged(Recipe):
    """o"""

    reads: ClassVar[tuple[str, ...]] = ("out",)

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return tokens.values["out"]


@dataclass(frozen=True)
class Biased(Unchanged):
    """o, and a bias after the last projection

    Source: vision transformers (arXiv 2010.11929), public code.
    """

    def parameters(self) -> dict[str, Parameter]:
        return {AFTER_PROJECTION: Parameter("x", Constant(0))}


@dataclass(frozen=True)
class Norm(Recipe):
    """γ RMSNorm(o), head by head

    Source: DeltaNet (arXiv 2406.06484); for linear attention, NormAttention (arXiv 2210.10340).
    """

    eps: float = 1e-5
    reads: ClassVar[tuple[str, ...]] = ("out",)

    def parameters(self) -> dict[str, Parameter]:
        return {"gain": Parameter("e", Constant(1))}

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return rms_norm(tokens.values["out"], self.eps, p["gain"])


@dataclass(frozen=True)
class GatedNorm(Norm):
    """γ RMSNorm(o) SiLU(W x), head by head

    Source: RetNet (arXiv 2307.08621), Eq. 8, with RMSNorm for its group norm as in
    flash-linear-attention, fla/layers/multiscale_retention.py; GLA (arXiv 2312.06635),
    fla/layers/gla.py; Gated DeltaNet (arXiv 2412.06464), 3.4.
    """

    def parameters(self) -> dict[str, Parameter]:
        return {**super().parameters(), "gate": Parameter("x …", FanIn(), 1)}

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return super().make(tokens, p) * self.activated(linear(tokens.x, p["gate"]))

    def activated(self, gate: Array) -> Array:
        return silu(gate)


@dataclass(frozen=True)
class SigmoidGatedNorm(GatedNorm):
    """γ RMSNorm(o) σ(W x), head by head

    Source: Comba (arXiv 2506.02475); flash-linear-attention, fla/layers/comba.py.
    """

    def activated(self, gate: Array) -> Array:
        return cast(sigmoid(upcast(gate)), gate.dtype)


@dataclass(frozen=True)
class LowRankGatedNorm(Norm):
    """γ RMSNorm(o) σ(B A x + b), head by head, A x as wide as a value

    Source: Kimi Linear (arXiv 2510.26692), 4; flash-linear-attention, fla/layers/kda.py.
    """

    def parameters(self) -> dict[str, Parameter]:
        return {
            **super().parameters(),
            **low_rank_maps("e", bias=True),
        }

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        score = linear(linear(tokens.x, p["down"]), p["up"], bias=p.get("bias"))
        return super().make(tokens, p) * cast(sigmoid(upcast(score)), score.dtype)


@dataclass(frozen=True)
class GatedGroupNorm(Recipe):
    """γ RMSNorm((o + D x') SiLU(W x)), over all heads that share keys

    Source: Mamba-2 (arXiv 2405.21060), 7; state-spaces/mamba, mamba_ssm/modules/mamba2.py.
    """

    eps: float = 1e-5
    reads: ClassVar[tuple[str, ...]] = ("out", "x", "k")
    joins: ClassVar[Literal["", "keys", "all"]] = "keys"

    def parameters(self) -> dict[str, Parameter]:
        gain, gate = Parameter("…", Constant(1)), Parameter("x …", FanIn(), 1)
        return {"gain": gain, "gate": gate, "D": Parameter("u", Constant(1))}

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        o, x, k = (tokens.values[name] for name in self.reads)
        xp = namespace(o)
        y = cast(upcast(o) + upcast(p["D"])[:, None] * upcast(x), o.dtype)
        y = y * silu(linear(tokens.x, p["gate"]))
        groups = (k.shape[2], y.shape[2] // k.shape[2], y.shape[3])
        gain = xp.reshape(p["gain"], groups)
        normed = rms_norm(xp.reshape(y, (*y.shape[:2], *groups)), self.eps, gain, axes=2)
        return xp.reshape(normed, y.shape)


@dataclass(frozen=True)
class NormOfHeads(Norm):
    """γ RMSNorm(o), over all heads together

    Source: HGRN2 (arXiv 2404.07904), 3.2; flash-linear-attention, fla/layers/hgrn2.py.
    """

    joins: ClassVar[Literal["", "keys", "all"]] = "all"

    def parameters(self) -> dict[str, Parameter]:
        return {"gain": Parameter("…", Constant(1))}

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return rms_norm(tokens.values["out"], self.eps, p["gain"], axes=2)


@dataclass(frozen=True)
class Activated(NormOfHeads):
    """γ RMSNorm(SiLU(o)), over all heads together

    Source: GSA (arXiv 2409.07146); flash-linear-attention, fla/layers/gsa.py.
    """

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return rms_norm(silu(tokens.values["out"]), self.eps, p["gain"], axes=2)
