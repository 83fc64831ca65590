"""The arguments of each layer's `Attention`, checked, from a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from precondattn.algebra.mechanism import Mechanism, parse
from precondattn.algebra.text import not_a_mechanism
from precondattn.given import Given
from precondattn.integrations.transformers.model.recipes import from_json, to_json
from precondattn.json_types import JsonObject
from precondattn.layers.decoder import check_mlp
from precondattn.layers.plan import plan_for
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
        of_layer["recipes"] = from_json(of_layer["recipes"])
        arguments.append({**of_layer, "mechanism": mechanism, "depth": depth})
    return arguments


def check_layers(config: Given) -> None:
    """Raise the error that constructing the layers would raise."""
    check_mlp(config.mlp)
    for arguments in layer_arguments(config):
        sizes = LayerSizes(config.hidden_size, **{n: arguments[n] for n in ("heads", *SIZES)})
        plan_for(arguments["mechanism"], sizes, arguments["recipes"])
