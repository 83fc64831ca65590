"""Gates and weights of tokens: β, log decays g, step sizes Δ. All are computed in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from precondattn.arrays import Array, namespace
from precondattn.layers.functions import log_decay, log_sigmoid, scores, sigmoid, softplus, upcast
from precondattn.layers.parameters import (
    InverseSoftplus,
    LogUniform,
    Parameter,
    linear_map,
    low_rank_maps,
)
from precondattn.layers.recipe import Recipe, RecipeTokens


@dataclass(frozen=True)
class Sigmoid(Recipe):
    """f σ(W x + b), f = `factor`

    Source: DeltaNet (arXiv 2406.06484); the factor 2, for negative eigenvalues: arXiv 2411.12537.
    """

    factor: float = 1.0
    bias: bool = False

    def parameters(self) -> dict[str, Parameter]:
        return linear_map("x …", bias=self.bias)

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return self.factor * sigmoid(scores(tokens.x, p))


@dataclass(frozen=True)
class StepOfSolve(Sigmoid):
    """f σ(W x + b), f = `factor`

    At W x = 0 it is 1, which is LUCID without weights.

    Source: LUCID (arXiv 2602.10410), 3.4 and Table 5, which learns it but does not say by which
    map; σ is DeltaNet's, and the factor ours.
    """

    factor: float = 2.0


@dataclass(frozen=True)
class LogSigmoid(Recipe):
    """log σ(W x + b) / c, c = `normalizer`

    Source: forgetting transformer (arXiv 2503.02130); without b and with c = 8, GSA (arXiv
    2409.07146), fla/layers/gsa.py.
    """

    normalizer: float = 1.0
    bias: bool = True

    def parameters(self) -> dict[str, Parameter]:
        return linear_map("x …", bias=self.bias)

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return log_sigmoid(scores(tokens.x, p)) / self.normalizer


@dataclass(frozen=True)
class LowRankLogSigmoid(Recipe):
    """log σ(B A x + b) / c, c = `normalizer`, A x of rank `rank`

    Source: GLA (arXiv 2312.06635); flash-linear-attention, fla/layers/gla.py.
    """

    rank: int = 16
    normalizer: float = 16.0

    def parameters(self) -> dict[str, Parameter]:
        return low_rank_maps(str(self.rank), bias=True)

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return log_sigmoid(scores(tokens.x, p)) / self.normalizer


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
        score = scores(tokens.x, p)
        if not self.low:
            return log_sigmoid(score)
        # 1 − (1 − β) σ(−W x) is never close to 0.
        return namespace(score).log1p((self.low - 1) * sigmoid(-score))


@dataclass(frozen=True)
class StepSize(Recipe):
    """Δ = softplus(W x + b), with Δ at x = 0 log-uniform in [`low`, `high`] at the start

    Source: Mamba-2 (arXiv 2405.21060), 7; state-spaces/mamba, mamba_ssm/modules/mamba2.py.
    """

    low: float = 0.001
    high: float = 0.1

    def parameters(self) -> dict[str, Parameter]:
        return {
            **linear_map("x …"),
            "dt_bias": Parameter("…", InverseSoftplus(self.low, self.high)),
        }

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return softplus(scores(tokens.x, p) + upcast(p["dt_bias"]))


@dataclass(frozen=True)
class DecayOfStep(Recipe):
    """−e^{A_log} Δ, with e^{A_log} uniform in [`low`, `high`] at the start

    Source: Mamba-2 (arXiv 2405.21060), 7; state-spaces/mamba, mamba_ssm/modules/mamba2.py.
    """

    low: float = 1.0
    high: float = 16.0
    reads: ClassVar[tuple[str, ...]] = ("dt",)

    def parameters(self) -> dict[str, Parameter]:
        return {"A_log": Parameter("…", LogUniform(self.low, self.high))}

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return log_decay(p["A_log"], tokens.values["dt"])


@dataclass(frozen=True)
class DecayWithBias(StepSize):
    """−e^{A_log} softplus(W x + b), A and b with the first values of Mamba-2

    Source: Gated DeltaNet (arXiv 2412.06464), 3.4; flash-linear-attention,
    fla/layers/gated_deltanet.py.
    """

    largest: float = 16.0

    def parameters(self) -> dict[str, Parameter]:
        # Away from 0, whose logarithm is −∞.
        return {**super().parameters(), "A_log": Parameter("…", LogUniform(0.01, self.largest))}

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        step, rate = super().make(tokens, p), p["A_log"]
        return log_decay(rate if rate.ndim + 2 == step.ndim else rate[:, None], step)


@dataclass(frozen=True)
class LowRankDecay(DecayWithBias):
    """−e^{A_log} softplus(B A x + b), A x as wide as a value, A_log for each head

    Source: Kimi Linear (arXiv 2510.26692), 4; flash-linear-attention, fla/layers/kda.py.
    """

    smallest: float = 1.0

    def parameters(self) -> dict[str, Parameter]:
        return {
            **low_rank_maps("e"),
            "dt_bias": Parameter("…", InverseSoftplus(self.low, self.high)),
            "A_log": Parameter("u", LogUniform(self.smallest, self.largest)),
        }


@dataclass(frozen=True)
class Written(Recipe):
    """1 − e^g, the part of a slot that decay leaves free

    Source: GSA (arXiv 2409.07146); flash-linear-attention, fla/layers/gsa.py.
    """

    reads: ClassVar[tuple[str, ...]] = ("g",)

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        g = tokens.values["g"]
        return -namespace(g).expm1(g)
