"""λ and the norm of differential attention.

In the layer with index l, from 0,

    λ_init = 0.8 − 0.6 e^{−0.3 l}.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from precondattn.arrays import Array, namespace
from precondattn.layers.functions import upcast
from precondattn.layers.parameters import Normal, Parameter
from precondattn.layers.recipe import Recipe, RecipeTokens
from precondattn.layers.recipes.gates import Sigmoid
from precondattn.layers.recipes.outputs import Norm


def first_lambda(depth: Array) -> float:
    """λ_init, of the kind of `depth`: a number, or an array ()."""
    exp = math.exp if isinstance(depth, int) else namespace(depth).exp
    return 0.8 - 0.6 * exp(-0.3 * depth)


@dataclass(frozen=True)
class LambdaOfVectors(Recipe):
    """e^{a₁·b₁} − e^{a₂·b₂} + λ_init, λ_init = 0.8 − 0.6 e^{−0.3 l} in layer l

    The four vectors are N(0, 0.1²) at the start.

    Source: Differential Transformer (arXiv 2410.05258), 2.1.
    """

    def parameters(self) -> dict[str, Parameter]:
        return {name: Parameter("… d", Normal(0.1)) for name in ("q1", "k1", "q2", "k2")}

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        product1, product2 = (
            namespace(p["q1"]).sum(upcast(p[f"q{i}"]) * upcast(p[f"k{i}"]), axis=-1) for i in (1, 2)
        )
        exp = namespace(product1).exp
        return exp(product1) - exp(product2) + first_lambda(tokens.depth)


@dataclass(frozen=True)
class LambdaOfToken(Sigmoid):
    """σ(W x + b), for each token and head

    Source: Differential Transformer V2, microsoft/unilm.
    """


@dataclass(frozen=True)
class DifferenceNorm(Norm):
    """(1 − λ_init) γ RMSNorm(o), head by head, λ_init as for λ

    Source: Differential Transformer (arXiv 2410.05258), 2.1; microsoft/unilm, with γ.
    """

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return (1 - first_lambda(tokens.depth)) * super().make(tokens, p)
