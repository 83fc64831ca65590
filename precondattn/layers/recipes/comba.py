"""The rows of Comba's layer: a second key to erase with, and queries that are corrected by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from precondattn.arrays import Array, cast
from precondattn.layers.functions import sigmoid, unit_rows, upcast
from precondattn.layers.parameters import Constant, Parameter
from precondattn.layers.recipe import Recipe, RecipeTokens
from precondattn.layers.recipes.projections import Convolution


@dataclass(frozen=True)
class InnerDecay(Recipe):
    """σ(δ) y, y the key before its norm, δ = 1 for each head at the start

    Source: Comba (arXiv 2506.02475), 3; flash-linear-attention, fla/layers/comba.py.
    """

    reads: ClassVar[tuple[str, ...]] = ("raw",)

    def parameters(self) -> dict[str, Parameter]:
        return {"decay": Parameter("h", Constant(1))}

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        rows = tokens.values["raw"]
        return cast(sigmoid(upcast(p["decay"]))[:, None] * upcast(rows), rows.dtype)


@dataclass(frozen=True)
class UnitKey(Recipe):
    """L2(y), y the key before its norm

    Source: Gated DeltaNet (arXiv 2412.06464), 3.4.
    """

    eps: float = 1e-6
    reads: ClassVar[tuple[str, ...]] = ("raw",)

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        return unit_rows(tokens.values[self.reads[0]], self.eps)


@dataclass(frozen=True)
class UnitEraseKey(UnitKey):
    """L2(σ(δ) y)

    The norm divides σ(δ) out again, but for ε: in this layer δ has no effect on p, and reaches the
    output through the correction of the queries alone.

    Source: flash-linear-attention, fla/layers/comba.py, whose operator normalises p too.
    """

    reads: ClassVar[tuple[str, ...]] = ("shortened",)


@dataclass(frozen=True)
class CorrectedQuery(Convolution):
    """L2(SiLU(conv(W x)) − D σ(δ) y), conv over `size` tokens, D = `correction` for each head at
    the start

    Source: Comba (arXiv 2506.02475), 3; flash-linear-attention, fla/layers/comba.py.
    """

    correction: float = 1.0
    eps: float = 1e-6
    reads: ClassVar[tuple[str, ...]] = ("shortened",)

    def parameters(self) -> dict[str, Parameter]:
        return {**super().parameters(), "D": Parameter("h", Constant(self.correction))}

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        rows = upcast(super().make(tokens, p))
        corrected = rows - upcast(p["D"])[:, None] * upcast(tokens.values["shortened"])
        return cast(unit_rows(corrected, self.eps), tokens.x.dtype)
