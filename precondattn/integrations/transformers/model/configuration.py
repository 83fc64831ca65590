"""`PrecondattnConfig`: a language model of attention layers, as plain JSON."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from precondattn.algebra.other_names import NO_DROPOUT, is_dropout, keyword_elsewhere
from precondattn.given import Arguments, Given
from precondattn.integrations.transformers.model.layer_arguments import (
    DEFAULT,
    attention_arguments,
    check_layers,
    mechanism_text,
    to_json,
)

LAYERS = 6
OF_OTHERS = ("sliding_window", "rope_theta", "use_rope", "use_short_conv", "conv_size", "qk_norm")
"""Settings in configurations of others, for which there are mechanisms and recipes here.

Transformers keeps any other argument as an attribute, without an effect.
"""


@strict
class PrecondattnConfig(PreTrainedConfig):
    """The configuration of `PrecondattnForCausalLM`.

    Parameters
    ----------
    mechanism : str or Mechanism, optional
        The mechanism of every layer, such as `"ccq(gated_delta)"`, with options in the text
        (`"lucid[scale=5]"`); `"softmax"` by default.
    layer_types : list of str or Mechanism, optional
        The mechanism of each layer, in place of `mechanism`: `["gla", "gla", "lucid"]`.
    num_hidden_layers : int, optional
        The number of layers; 6 by default, or the length of `layer_types`.
    vocab_size, hidden_size, num_attention_heads : int
        The size of the vocabulary, the width of the hidden states, and the number of query heads.
    intermediate_size : int, optional
        The inner width of the MLPs, with the default of `Block`.
    mlp : {"gated", "plain"}
        The kind of MLP, as in `Block`.
    num_key_value_heads, num_value_heads, head_dim, value_head_dim, num_slots : int, optional
        `kv_heads`, `value_heads`, `head_dim`, `value_dim` and `slots` of every layer's `Attention`.
    recipes : dict, optional
        Other recipes for every layer, by input: a recipe of `precondattn.layers.recipes`, or its
        JSON, `{"q": {"recipe": "Rotary", "theta": 500000.0}}`.
    attention_arguments : dict, optional
        Other arguments of `precondattn.layers.torch.Attention` for the layers of one mechanism:
        `{"lucid": {"kv_heads": 2}}`.
    initializer_range : float
        The standard deviation of the embedding, and of a head that is not tied to it. The other
        weights start as their recipes say.
    tie_word_embeddings : bool
        Whether the embedding is also the output matrix.

    Raises
    ------
    TypeError, ValueError
        for an unknown mechanism, one that is not causal, sizes and recipes that do not fit it,
        and `layer_types` of another length than `num_hidden_layers`.

    Examples
    --------
    >>> from precondattn.integrations.transformers import PrecondattnConfig
    >>> config = PrecondattnConfig(
    ...     vocab_size=100, hidden_size=32, num_attention_heads=4, layer_types=["gla", "lucid"]
    ... )
    >>> config.num_hidden_layers
    2
    """

    model_type = "precondattn"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  Transformers' own name.

    vocab_size: int = 32_000
    hidden_size: int = 512
    intermediate_size: int | None = None
    mlp: str = "gated"
    num_hidden_layers: int | None = None
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    num_value_heads: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    num_slots: int | None = None
    mechanism: Given = None
    layer_types: Given = None
    recipes: Given = None
    attention_arguments: Given = None
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Given) -> None:
        for name in (name for name, rate in kwargs.items() if rate and is_dropout(name)):
            raise TypeError(f"PrecondattnConfig: {name}: {NO_DROPOUT}")
        for name in (name for name in OF_OTHERS if kwargs.get(name) is not None):
            raise TypeError(f"PrecondattnConfig: {name} has no effect{keyword_elsewhere(name)}")
        if self.mechanism is not None and self.layer_types is not None:
            raise ValueError(
                f"pass mechanism or layer_types, not both; found mechanism={self.mechanism!r} and "
                f"layer_types={self.layer_types!r}"
            )
        if self.layer_types is None:
            self.mechanism = mechanism_text(self.mechanism or DEFAULT)
            self.num_hidden_layers = self.num_hidden_layers or LAYERS
        elif isinstance(self.layer_types, list | tuple) and self.layer_types:
            self.layer_types = [mechanism_text(layer) for layer in self.layer_types]
            self.num_hidden_layers = self.num_hidden_layers or len(self.layer_types)
        else:
            raise TypeError(
                f"layer_types must be a list with a mechanism for each layer; found "
                f"{self.layer_types!r}"
            )
        self.recipes = to_json(self.recipes)
        mechanisms = self.layer_types or [self.mechanism]
        self.attention_arguments = attention_arguments(self.attention_arguments, mechanisms)
        super().__post_init__(**kwargs)
        check_layers(self)

    def to_dict(self) -> Arguments:
        """As of Transformers, but `num_key_value_heads` only if it is given: PEFT multiplies it."""
        config: Arguments = super().to_dict()
        return {k: v for k, v in config.items() if k != "num_key_value_heads" or v is not None}

    def validate_layer_type(self) -> None:
        """Skip Transformers' check, which knows only its own layer types."""
        check_layers(self)
