"""The gates and the output of xLSTM's layer around mLSTM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from precondattn.arrays import Array, cast, namespace
from precondattn.layers.functions import layer_norm, linear, log_sigmoid, scores, sigmoid, upcast
from precondattn.layers.parameters import Constant, FanIn, FirstValues, Parameter, Spaced
from precondattn.layers.recipe import Recipe, RecipeTokens
from precondattn.layers.recipes.outputs import Norm


@dataclass(frozen=True)
class CappedGate(Recipe):
    """c tanh((W x + b) / c), c = `cap`, with W = 0 and b = `start` at the start

    Source: xLSTM 7B (arXiv 2503.13427), 3; Transformers, models/xlstm.
    """

    cap: float = 15.0
    start: float = -10.0

    def parameters(self) -> dict[str, Parameter]:
        return {
            "weight": Parameter("x …", Constant(0), 1, "bias"),
            "bias": Parameter("…", self.first_bias()),
        }

    def first_bias(self) -> FirstValues:
        return Constant(self.start)

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        score = scores(tokens.x, p)
        return self.cap * namespace(score).tanh(score / self.cap)


@dataclass(frozen=True)
class CappedLogSigmoid(CappedGate):
    """log σ(c tanh((W x + b) / c)), c = `cap`, with W = 0 and b from `start` to `end` at the start

    Source: xLSTM 7B (arXiv 2503.13427), 3; Transformers, models/xlstm.
    """

    start: float = 3.0
    end: float = 6.0

    def first_bias(self) -> FirstValues:
        return Spaced(self.start, self.end)

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return log_sigmoid(super().make(tokens, p))


@dataclass(frozen=True)
class SigmoidGatedLayerNorm(Norm):
    """γ ∘ LayerNorm(o) σ(W x), head by head, with a γ of each head

    Source: xLSTM 7B (arXiv 2503.13427), 3; Transformers, models/xlstm.
    """

    eps: float = 1e-6

    def parameters(self) -> dict[str, Parameter]:
        return {"gain": Parameter("…", Constant(1)), "gate": Parameter("x …", FanIn(), 1)}

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        out, gate = tokens.values["out"], linear(tokens.x, p["gate"])
        normed = upcast(p["gain"]) * layer_norm(upcast(out), self.eps)
        return cast(normed * sigmoid(upcast(gate)), out.dtype)
