"""A recipe: how one input of a mechanism is made from the hidden states x of a model.

A recipe is a frozen dataclass. Its fields are options, its docstring is the equation and its
source, `parameters()` declares its weights and `make` computes the input, with array functions of
any library. What it may read of a call is a `RecipeTokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import ClassVar, Literal, NamedTuple

from precondattn.arrays import Array
from precondattn.layers.parameters import Parameter


class RecipeTokens(NamedTuple):
    """What the recipe of one input may read."""

    x: Array
    """Hidden states (b, t, x)."""
    rotation: Callable[[int, float], tuple[Array, Array]]
    """`rotation(width, theta)`: cos and sin of the angles of the tokens' positions."""
    values: Mapping[str, Array]
    """The values that the recipe `reads`, by its own names of them."""
    convolved: Callable[[Array, Array, Array | None], Array]
    """`convolved(rows, w, b)` is y_t = Σ_i w_i x_{t−c+1+i} + b, channel by channel, of rows x
    (b, t, …) with w (c, …). Rows before the first token of a sequence are 0, and the cache keeps
    the last c − 1, the recipe's `history()`."""
    depth: int | None
    """The index of the layer in its model, from 0: a number, or an integer array ()."""


class Recipe:
    """The base class of all recipes."""

    reads: ClassVar[tuple[str, ...]] = ()
    """Values that have to be made before: inputs of the same leaf, or `helpers` of its table."""
    joins: ClassVar[Literal["", "keys", "all"]] = ""
    """Which heads it can not compute alone: none, those that share `keys`, or `all`."""

    def parameters(self) -> dict[str, Parameter]:
        """Its weights by name."""
        return {}

    def history(self) -> int:
        """How many rows before the new tokens it reads."""
        return 0

    def history_shape(self) -> str | None:
        """The shape of such a row, as that of a `Parameter`; None for that of the input."""
        return None

    def make(self, tokens: RecipeTokens, p: Mapping[str, Array]) -> Array:
        """The input, from the weights `p`."""
        raise NotImplementedError

    @property
    def equation(self) -> str:
        """The first paragraph of its docstring, with its options in place of their names."""
        text = " ".join((self.__doc__ or "").strip().partition("\n\n")[0].split())
        for field in fields(self):  # type: ignore[arg-type]
            value: object = getattr(self, field.name)
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            text = text.replace(f"`{field.name}`", shown)
        return text if getattr(self, "bias", True) else text.replace(" + b", "")

    @property
    def source(self) -> str:
        """Where the recipe is from: the last paragraph of its docstring."""
        text = " ".join((self.__doc__ or "").strip().split("\n\n")[-1].split())
        return text.removeprefix("Source: ") if text.startswith("Source: ") else ""
