"""The arguments of each layer's `Attention`, checked, from a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields

from precondattn.algebra.mechanism import Mechanism, parse
from precondattn.algebra.text import not_a_mechanism
from precondattn.given import Given
from precondattn.json_types import Json, JsonObject
from precondattn.layers import recipes
from precondattn.layers.decoder import check_mlp
from precondattn.layers.plan import plan_for
from precondattn.layers.recipe import Recipe
from precondattn.layers.sizes import LayerSizes

DEFAULT = "softmax"
SIZES = {
    "kv_heads": "num_key_value_heads",
    "value_heads": "num_value_heads",
    "head_dim": "head_dim",
    "value_dim": "value_head_dim",
    "slots": "num_slots",
}
"""The name in a configuration of each size of `Attention` that may be None."""
ARGUMENTS = ("heads", *SIZES, "recipes")
NAME = "recipe"
RECIPES: dict[str, type[Recipe]] = {
    name: value
    for name, value in vars(recipes).items()
    if isinstance(value, type) and issubclass(value, Recipe)
}
"""The recipes that a configuration can name, in JSON `{"recipe": "Rotary", "theta": 500000.0}`.
Files can not name other code."""


def mechanism_text(mechanism: Given) -> str:
    """The text of a mechanism that a configuration stores."""
    if isinstance(mechanism, str):
        parsed = parse(mechanism)
    elif isinstance(mechanism, Mechanism):
        parsed = mechanism
        if parse(str(parsed)) != parsed:
            raise ValueError(
                f"mechanism: a configuration stores its text, and {str(parsed)!r} is another one"
            )
    else:
        raise not_a_mechanism(mechanism)
    if not parsed.offers.causal:
        raise ValueError(f"mechanism: {parsed} is not causal, as a language model has to be")
    return str(parsed)


def attention_arguments(
    by_mechanism: Given, mechanisms: Sequence[str]
) -> dict[str, JsonObject] | None:
    """Arguments of `Attention` by mechanism, as plain JSON."""
    if by_mechanism is None:
        return None
    if not isinstance(by_mechanism, Mapping) or not all(
        isinstance(a, Mapping) for a in by_mechanism.values()
    ):
        raise TypeError(
            f"attention_arguments must be a dict of dicts, by mechanism; found {by_mechanism!r}"
        )
    plain = {}
    for mechanism, arguments in by_mechanism.items():
        text = mechanism_text(mechanism)
        if text not in mechanisms:
            raise ValueError(
                f"attention_arguments: no layer is {text!r}; the layers are {', '.join(mechanisms)}"
            )
        unknown = [name for name in arguments if name not in ARGUMENTS]
        if unknown:
            raise ValueError(
                f"attention_arguments: {unknown[0]!r} of {text} is none of {', '.join(ARGUMENTS)}"
            )
        plain[text] = dict(arguments)
        if "recipes" in arguments:
            plain[text]["recipes"] = to_json(arguments["recipes"])
    return plain


def layer_arguments(config: Given) -> list[JsonObject]:
    """The arguments of `Attention` for each layer of a configuration."""
    count = config.num_hidden_layers
    types = config.layer_types or [config.mechanism] * count
    if len(types) != count:
        raise ValueError(
            f"layer_types must have an entry for each of the num_hidden_layers={count} layers; "
            f"found {len(types)}"
        )
    shared: JsonObject = {size: getattr(config, name) for size, name in SIZES.items()}
    shared.update(heads=config.num_attention_heads, recipes=config.recipes)
    arguments = []
    for depth, mechanism in enumerate(types):
        of_layer = {**shared, **(config.attention_arguments or {}).get(mechanism, {})}
        if of_layer["recipes"] is not None:
            described = of_layer["recipes"].items()
            of_layer["recipes"] = {name: _recipe_of(name, each) for name, each in described}
        arguments.append({**of_layer, "mechanism": mechanism, "depth": depth})
    return arguments


def check_layers(config: Given) -> None:
    """Raise the error that constructing the layers would raise."""
    check_mlp(config.mlp)
    for arguments in layer_arguments(config):
        sizes = LayerSizes(config.hidden_size, **{n: arguments[n] for n in ("heads", *SIZES)})
        plan_for(arguments["mechanism"], sizes, arguments["recipes"])


def to_json(by_input: Given) -> dict[str, JsonObject] | None:
    """Recipes by input, each a `Recipe` or already JSON, as JSON."""
    if by_input is None:
        return None
    if not isinstance(by_input, Mapping):
        raise TypeError(f"recipes must be a dict by the names of inputs; found {by_input!r}")
    return {name: _json_of(name, recipe) for name, recipe in by_input.items()}


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
