"""Inputs that are the same for all tokens: parameters, and ALiBi's slopes of heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from precondattn.arrays import Array, namespace, placement
from precondattn.layers.functions import softplus, upcast
from precondattn.layers.parameters import Constant, Identity, Normal, Parameter
from precondattn.layers.recipe import Recipe, RecipeTokens


@dataclass(frozen=True)
class Learned(Recipe):
    """a parameter, `start` at the start"""

    start: float = 0.0

    def parameters(self) -> dict[str, Parameter]:
        return {"weight": Parameter("…", Constant(self.start))}

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return p["weight"]


@dataclass(frozen=True)
class LearnedIdentity(Learned):
    """a parameter, the identity matrix at the start

    Source: Hedgehog (arXiv 2402.04347).
    """

    def parameters(self) -> dict[str, Parameter]:
        return {"weight": Parameter("…", Identity())}


@dataclass(frozen=True)
class LearnedNoise(Learned):
    """a parameter, N(0, `deviation`²) at the start

    Source: Nyströmformer (arXiv 2102.03902), public code; timm, models/swin_transformer.py, whose
    bounds of ±2 are 100 deviations away. T5's table has a deviation of 1/√(width) in Transformers.
    """

    deviation: float = 0.02

    def parameters(self) -> dict[str, Parameter]:
        return {"weight": Parameter("…", Normal(self.deviation))}


@dataclass(frozen=True)
class Positive(Recipe):
    """e^p, 1 at the start

    Source: LASER (arXiv 2411.03493), 4.1, where it is tuned by hand; the exponential keeps it > 0.
    """

    def parameters(self) -> dict[str, Parameter]:
        return {"log": Parameter("…", Constant(0))}

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return namespace(p["log"]).exp(upcast(p["log"]))


@dataclass(frozen=True)
class Ridge(Recipe):
    """softplus(p) + `low`, `start` at the start

    Source: MesaNet (arXiv 2506.05233); flash-linear-attention, fla/layers/mesa_net.py.
    """

    low: float = 0.25
    start: float = 1.0

    def parameters(self) -> dict[str, Parameter]:
        return {"weight": Parameter("…", Constant(math.log(math.expm1(self.start - self.low))))}

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return softplus(upcast(p["weight"])) + self.low


def alibi_slopes(heads: int) -> list[float]:
    """2^{−8 i / h} for heads i = 1, … h, where h is a power of two.

    Another number of heads takes those of the next smaller power of two, and then every other one
    of the next larger power, as ALiBi's public code does.

    Examples
    --------
    >>> alibi_slopes(4), alibi_slopes(3)
    ([0.25, 0.0625, 0.015625, 0.00390625], [0.0625, 0.00390625, 0.25])
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2.0 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]


@dataclass(frozen=True)
class AlibiSlopes(Recipe):
    """2^{−8 i / h} of query heads i = 1 … h, and no parameter

    Source: ALiBi (arXiv 2108.12409), 3; its public code where h is no power of two.
    """

    reads: ClassVar[tuple[str, ...]] = ("q",)
    joins: ClassVar[Literal["", "keys", "all"]] = "all"

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        q = tokens.values["q"]
        dtype = upcast(q[:1, :1, :1, :1]).dtype
        return namespace(q).asarray(alibi_slopes(q.shape[2]), dtype=dtype, **placement(q))
