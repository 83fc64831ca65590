"""Replacing the softmax attention of a model by a mechanism, after checks of everything."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from precondattn.algebra.mechanism import Mechanism, parse
from precondattn.algebra.text import not_a_mechanism
from precondattn.given import Given
from precondattn.integrations.transformers import learned
from precondattn.integrations.transformers.attention import (
    NAME,
    OF_ENCODER,
    Replacement,
    attention,
    options_of,
    pass_cache_layer,
    with_options,
)
from precondattn.integrations.transformers.masks import check_masks, mask_of_encoder, mask_of_tokens
from precondattn.integrations.transformers.rollback import whole_or_not

PREVIOUS = "precondattn_replaces"
"""The attribute of a model with the name of its former implementation."""

# Without a mask function of the same name, Transformers passes no mask at all.
for _name, _mask in ((NAME, mask_of_tokens), (OF_ENCODER, mask_of_encoder)):
    ALL_ATTENTION_FUNCTIONS.register(_name, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, _mask)


@whole_or_not
def replace_attention(
    model: nn.Module,
    mechanism: str | Mechanism | None = None,
    *,
    layers: Sequence[str | Mechanism] | None = None,
) -> nn.Module:
    """Put a mechanism in place of softmax attention, in all layers of a model.

    The model keeps its projections, rotary embeddings, scale, grouped heads, sliding windows, soft
    cap and sinks. A temperature, a scale per dimension and a new sink become parameters of the
    attention modules, under `mechanism_inputs`.

    Parameters
    ----------
    model : PreTrainedModel
        A causal decoder or an encoder whose attention goes through Transformers'
        `AttentionInterface`. It is changed in place.
    mechanism : str or Mechanism, optional
        Softmax, or preconditioners around it, such as `"lucid(laser)"`. In an encoder the softmax
        is not causal: `"lucid"` means `"lucid(softmax[causal=false])"`, LUCID's symmetric solve.
    layers : sequence of str or Mechanism, optional
        The mechanism of each layer, in place of `mechanism`.

    Returns
    -------
    PreTrainedModel
        The same model.

    Raises
    ------
    TypeError, ValueError
        for a model or a mechanism that does not fit, with the reason. The model is then unchanged.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from precondattn.integrations.transformers import replace_attention
    >>> config = LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    ...     num_attention_heads=4, num_key_value_heads=2,
    ... )
    >>> model = replace_attention(LlamaForCausalLM(config), layers=["softmax", "lucid"])
    >>> model.config._attn_implementation
    'precondattn'
    """
    config, modules = _attention_of(model)
    mechanisms = _for_layers(mechanism, layers, len(modules))
    chosen = []
    for index, (module, wanted) in enumerate(zip(modules, mechanisms, strict=True)):
        options = options_of(module, config, index)
        complete = with_options(wanted, options)
        chosen.append((complete, options, learned.learned_inputs(complete, options.sink)))
    _set_implementation(model, NAME if chosen[0][1].causal else OF_ENCODER)
    for module, (complete, options, inputs) in zip(modules, chosen, strict=True):
        _forget(module)
        width = getattr(module, "head_dim", config.hidden_size // config.num_attention_heads)
        sizes = {"h": config.num_attention_heads, "d": width}
        learned.add_parameters(module, complete, inputs, sizes)
        handle = module.register_forward_pre_hook(pass_cache_layer, with_kwargs=True)
        setattr(module, NAME, Replacement(complete, options, inputs, handle))
        module.extra_repr = partial(_shown, module.extra_repr(), str(complete))
    check_masks(model)
    return model


@whole_or_not
def restore_attention(model: nn.Module) -> nn.Module:
    """Restore a model's own attention, and remove the parameters that were added."""
    previous = getattr(model, PREVIOUS, None)
    if previous is None:
        raise ValueError("model: its attention has not been replaced")
    for module in _attention_of(model)[1]:
        _forget(module)
    model.set_attn_implementation(previous)
    check_masks(model, False)
    delattr(model, PREVIOUS)
    return model


def _attention_of(model: nn.Module) -> tuple[Given, list[nn.Module]]:
    """The config of a decoder or encoder, and its attention modules in order."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: a PreTrainedModel of Transformers expected; found {type(model).__name__}"
        )
    config: Given = model.config
    if config.is_encoder_decoder:
        raise TypeError(
            f"model: a causal decoder or an encoder expected; {type(model).__name__} has both, and "
            f"attention from one to the other"
        )
    if config.get_text_config(decoder=True) is not config:
        raise TypeError(
            f"model: {type(model).__name__} has several models in it; pass its language model alone"
        )
    if getattr(config, "attention_chunk_size", None):
        raise TypeError("model: chunked attention is a pattern that no mechanism has")
    of_attention = _attention_class(model)
    # A function of the interface gets the scale of its module.
    found = [m for m in model.modules() if isinstance(m, of_attention) and hasattr(m, "scaling")]
    if len(found) != config.num_hidden_layers:
        raise TypeError(
            f"model: one attention module in each of {config.num_hidden_layers} layers expected; "
            f"{type(model).__name__} has {len(found)}, and for other layers Transformers has no "
            f"interface"
        )
    if len({bool(getattr(m, "is_causal", True)) for m in found}) > 1:
        raise TypeError(f"model: some layers of {type(model).__name__} are causal, and some not")
    if any(hasattr(m, "lambda_q1") for m in found):
        raise TypeError(
            f"model: {type(model).__name__} calls attention twice in a layer and subtracts; its "
            f"own attention is differential already"
        )
    return config, found


def _attention_class(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """The class of the attention modules that use the `AttentionInterface`; empty without one.

    Transformers names it as the one whose outputs are a model's `attentions`.
    """
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("attentions")
    recorded = getattr(recorded, "target_class", recorded)
    if not model._supports_attention_backend or not isinstance(recorded, type):
        return ()
    return (recorded,)


def _for_layers(
    mechanism: str | Mechanism | None, layers: Sequence[str | Mechanism] | None, count: int
) -> list[Mechanism]:
    """One mechanism for each layer."""
    if (mechanism is None) is (layers is None):
        raise TypeError("replace_attention: mechanism or layers expected, and not both")
    if isinstance(layers, str):
        raise TypeError(f"layers: a mechanism for each layer expected; found the text {layers!r}")
    wanted = [mechanism] * count if layers is None else [*layers]
    if len(wanted) != count:
        raise ValueError(f"layers: {count} mechanisms expected, one a layer; found {len(wanted)}")
    parsed = [parse(one) if isinstance(one, str) else one for one in wanted]
    for one in parsed:
        if not isinstance(one, Mechanism):
            raise not_a_mechanism(one)
    return parsed  # type: ignore[return-value]


def _set_implementation(model: nn.Module, name: str) -> None:
    previous = model.config._attn_implementation
    if previous == name:
        return
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise TypeError(
            f"model: the attention of {type(model).__name__} does not go through Transformers' "
            f"AttentionInterface"
        )
    setattr(model, PREVIOUS, previous)


def _shown(shown: str, mechanism: str) -> str:
    """What `print` shows of an attention module, besides the modules in it."""
    return ", ".join(filter(None, (shown, f"mechanism={mechanism!r}")))


def _forget(module: nn.Module) -> None:
    """Undo an earlier replacement."""
    earlier: Replacement | None = getattr(module, NAME, None)
    if earlier is None:
        return
    earlier.handle.remove()
    delattr(module, NAME)
    delattr(module, "extra_repr")
    if hasattr(module, learned.NAME):
        delattr(module, learned.NAME)
