"""Recipes as plain JSON, `{"recipe": "Rotary", "theta": 500000.0}`, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields

from precondattn.given import Given
from precondattn.json_types import Json, JsonObject
from precondattn.layers import recipes as known
from precondattn.layers.recipe import Recipe

NAME = "recipe"
RECIPES: dict[str, type[Recipe]] = {
    name: value
    for name, value in vars(known).items()
    if isinstance(value, type) and issubclass(value, Recipe)
}
"""The recipes that a configuration can name. Files can not name other code."""


def to_json(recipes: Given) -> dict[str, JsonObject] | None:
    """Recipes by input, each a `Recipe` or already JSON, as JSON."""
    if recipes is None:
        return None
    if not isinstance(recipes, Mapping):
        raise TypeError(f"recipes must be a dict by the names of inputs; found {recipes!r}")
    return {name: _json_of(name, recipe) for name, recipe in recipes.items()}


def from_json(recipes: Mapping[str, Mapping[str, Json]] | None) -> dict[str, Recipe] | None:
    """The recipes from the JSON of `to_json`."""
    if recipes is None:
        return None
    return {name: _recipe_of(name, described) for name, described in recipes.items()}


def _json_of(name: str, recipe: Given) -> JsonObject:
    if isinstance(recipe, Mapping):
        recipe = _recipe_of(name, recipe)
    kind = type(recipe)
    if RECIPES.get(kind.__name__) is not kind:
        raise TypeError(
            f"recipes: that of {name} must be one of precondattn.layers.recipes, which a "
            f"configuration can store; found {recipe!r}"
        )
    return {NAME: kind.__name__, **asdict(recipe)}


def _recipe_of(name: str, described: Mapping[str, Json]) -> Recipe:
    if not isinstance(described, Mapping):
        raise TypeError(f"recipes: that of {name} must be a dict; found {described!r}")
    options = dict(described)
    kind = options.pop(NAME, None)
    if kind not in RECIPES:
        raise ValueError(
            f"recipes: that of {name} must have {NAME!r}, one of {', '.join(RECIPES)}; found "
            f"{kind!r}"
        )
    made = RECIPES[kind]
    accepted = [field.name for field in fields(made)]  # type: ignore[arg-type]
    unknown = [option for option in options if option not in accepted]
    if unknown:
        raise ValueError(
            f"recipes: {kind} has no option {unknown[0]!r}; it has {', '.join(accepted) or 'none'}"
        )
    return made(**options)
