"""ALiBi's slopes of heads, which are not trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from precondattn.arrays import Array, namespace, placement
from precondattn.layers.functions import upcast
from precondattn.layers.recipe import Recipe, RecipeTokens


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
