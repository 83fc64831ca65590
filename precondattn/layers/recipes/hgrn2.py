"""HGRN2's recipes: a forget gate with a lower bound, and a norm of all heads together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from precondattn.arrays import Array, namespace
from precondattn.layers.functions import linear, log_sigmoid, rms_norm, sigmoid, upcast
from precondattn.layers.parameters import Constant, Parameter, linear_map
from precondattn.layers.recipe import Recipe, RecipeTokens
from precondattn.layers.recipes.outputs import Norm


@dataclass(frozen=True)
class BoundedLogSigmoid(Recipe):
    """log(β + (1 − β) σ(W x)), β = `low`, the least that a token keeps

    Source: HGRN2 (arXiv 2404.07904), 3.1; flash-linear-attention, fla/layers/hgrn2.py. There β is 0
    in the first layer and grows from layer to layer, to values that are learned; here it is a
    constant of each layer.
    """

    low: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < 1:
            raise ValueError(f"BoundedLogSigmoid: low must be in [0, 1); found {self.low}")

    def parameters(self) -> dict[str, Parameter]:
        return linear_map("x …")

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        score = upcast(linear(tokens.x, p["weight"]))
        if not self.low:
            return log_sigmoid(score)
        # 1 − (1 − β) σ(−W x) is never close to 0.
        return namespace(score).log1p((self.low - 1) * sigmoid(-score))


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
