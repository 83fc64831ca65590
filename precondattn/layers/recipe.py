"""Recipes, which compute the inputs of a mechanism from the hidden states x of a model.

A recipe is a frozen dataclass. Its fields are options, and its docstring has the equation and the
source. `parameters()` declares its weights, and `make` computes the input, with array functions of
any library, from the data of a call in a `RecipeTokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import ClassVar, Literal, NamedTuple

from precondattn.arrays import Array
from precondattn.layers.parameters import Parameter

SIGNS = """−- ∘* ·* …... ₁1 ₂2 ²^2 \u0304_bar αalpha βbeta γgamma δdelta εepsilon ηeta θtheta κkappa
λlambda μmu ρrho σsigma ΔDelta Σsum"""
"""The signs of equations, each followed by the text that is printed."""
SPELLED = {ord(each[0]): each[1:] for each in SIGNS.split()}


class RecipeTokens(NamedTuple):
    """The data of a call that a recipe may read."""

    x: Array
    """The hidden states (b, t, x)."""
    rotation: Callable[[int, float], tuple[Array, Array]]
    """A function `rotation(width, theta)` that returns cosines and sines of the tokens' angles."""
    values: Mapping[str, Array]
    """The values that the recipe declares in `reads`, by its own names."""
    convolved: Callable[[Array, Array, Array | None], Array]
    """A function `convolved(rows, w, b)` for the depthwise convolution y_t = Σ_i w_i x_{t−c+1+i} +
    b of rows x (b, t, …) with w (c, …). Rows before the first token of a sequence are 0. The cache
    keeps the last c − 1 rows, the number that `history()` returns."""
    depth: int | None
    """The index of the layer in its model, from 0: an int, or an integer array ()."""


class Recipe:
    """The base class of all recipes."""

    reads: ClassVar[tuple[str, ...]] = ()
    """The values that must be computed before: inputs of the same leaf, or helpers of its table."""
    joins: ClassVar[Literal["", "keys", "all"]] = ""
    """The heads that must be computed together: none (""), those that share "keys", or "all"."""

    def parameters(self) -> dict[str, Parameter]:
        """The declarations of the weights, by name."""
        return {}

    def history(self) -> int:
        """The number of rows before the new tokens that the recipe reads."""
        return 0

    def history_shape(self) -> str | None:
        """The shape of such a row, as for a `Parameter`; None if it is that of the input."""
        return None

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        """The input of the mechanism, computed with the weights `p`."""
        raise NotImplementedError

    @property
    def equation(self) -> str:
        """The first paragraph of the docstring, with values in place of the options' names."""
        text = " ".join((self.__doc__ or "").strip().partition("\n\n")[0].split())
        for field in fields(self):  # type: ignore[arg-type]
            value: object = getattr(self, field.name)
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            text = text.replace(f"`{field.name}`", shown)
        return text if getattr(self, "bias", True) else text.replace(" + b", "")

    @property
    def printed(self) -> str:
        """The equation in ASCII, which every terminal and pipe shows."""
        return self.equation.translate(SPELLED).encode("ascii", "backslashreplace").decode()

    @property
    def source(self) -> str:
        """The source of the recipe: the last paragraph of its docstring."""
        text = " ".join((self.__doc__ or "").strip().split("\n\n")[-1].split())
        return text.removeprefix("Source: ") if text.startswith("Source: ") else ""
