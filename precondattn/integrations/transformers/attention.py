"""The attention function of this integration, its options, and the hook for the cache's layer.

Transformers updates the cache before it calls the attention function, and does not pass the cache
to it. So a hook before an attention module puts our layer into the cache, and passes this layer to
the attention function as a keyword argument.

Scale, window, soft cap, sink and causality of a model's attention become options of plain softmax,
which is the base of every mechanism that can replace it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from precondattn.algebra.mechanism import Mechanism
from precondattn.algebra.options import OptionValue
from precondattn.given import Given
from precondattn.integrations.transformers.cache_layers import layer_for
from precondattn.integrations.transformers.learned import Input, values
from precondattn.integrations.transformers.masks import masks_of
from precondattn.spec.softmax import Softmax

NAME = "precondattn"
"""The implementation's name in Transformers, and the attribute of a module with its mechanism."""
OF_ENCODER = "precondattn_encoder"
"""The implementation's name in encoders, which have another mask function."""
CACHES = ("past_key_values", "layer_past")
"""The names that attention modules have for the cache."""
LAYER = "precondattn_cache_layer"
"""The keyword argument with the layer of the cache."""


class AttentionOptions(NamedTuple):
    """The options of a model's attention."""

    scale: float | None
    window: int | None
    softcap: float | None
    sink: bool
    causal: bool = True


def options_of(module: nn.Module, config: Given, index: int) -> AttentionOptions:
    """The options of one attention module."""
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if types is not None and types[index] == "full_attention":
        window = None
    return AttentionOptions(
        getattr(module, "scaling", None),
        window,
        getattr(module, "attn_logit_softcapping", None),
        getattr(module, "sinks", None) is not None,
        bool(getattr(module, "is_causal", True) and getattr(config, "is_causal", True)),
    )


def with_options(mechanism: Mechanism, options: AttentionOptions) -> Mechanism:
    """The mechanism with these options in its base."""
    base = getattr(mechanism, "base", None)
    if base is not None:
        return replace(mechanism, base=with_options(base, options))
    if type(mechanism) is not Softmax:
        raise TypeError(
            f"{mechanism} is not softmax; what can take the place of a model's softmax are softmax "
            f"and its preconditioners, such as 'lucid' or 'lucid(laser)'"
        )
    if options.causal and not mechanism.causal:
        raise ValueError(f"{mechanism}: the model is causal, and the mechanism is not")
    if not options.causal and options.window is not None:
        raise ValueError(
            f"sliding_window: the model is an encoder with a window of {options.window}, whose "
            f"sides no mechanism here counts as it does"
        )
    return replace(
        mechanism,
        causal=options.causal,
        scale=_one("scale", mechanism.scale, options.scale),
        window=_one("window", mechanism.window, options.window),
        softcap=_one("softcap", mechanism.softcap, options.softcap),
        sink=mechanism.sink or options.sink,
    )


def _one(name: str, of_mechanism: OptionValue, of_model: OptionValue) -> OptionValue:
    """The option of the mechanism or of the model, whichever has it."""
    if of_mechanism is None or of_model is None or math.isclose(of_mechanism, of_model):
        return of_model if of_mechanism is None else of_mechanism
    raise ValueError(f"{name}: the mechanism has {of_mechanism}, and the model {of_model}")


class Replacement(NamedTuple):
    """The replacement of the softmax of one attention module."""

    mechanism: Mechanism
    options: AttentionOptions
    inputs: tuple[Input, ...]
    handle: RemovableHandle
    """The handle that removes the hook."""


def pass_cache_layer(
    module: nn.Module, args: tuple[Given, ...], kwargs: dict[str, Given]
) -> tuple[tuple[Given, ...], dict[str, Given]] | None:
    """The hook before an attention module."""
    cache = next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)
    if cache is None:
        return None
    return args, {**kwargs, LAYER: layer_for(cache, module.layer_idx)}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Given,
) -> tuple[Tensor, None]:
    """The mechanism's output (b, t, h, e), from Transformers' q, k and v (b, heads, t, width)."""
    replacement: Replacement | None = getattr(module, NAME, None)
    if replacement is None:
        raise ValueError(
            f"{type(module).__name__} has no mechanism; call replace_attention(model, ...), which "
            f"sets attn_implementation={NAME!r} itself"
        )
    layer = others.pop(LAYER, None)
    _check(replacement, scaling, dropout, others)
    arrays = {
        "q": query.transpose(1, 2),
        "k": key.transpose(1, 2),
        "v": value.transpose(1, 2),
        **values(module, replacement.inputs),
    }
    if replacement.options.sink:
        arrays["sink"] = others["s_aux"]
    start = 0 if layer is None else layer.get_seq_length()
    masks = masks_of(attention_mask, replacement.mechanism, start, query.shape[2])
    if layer is not None:
        if masks.segment_ids is not None:
            raise ValueError("position_ids: packed sequences can not be cached")
        return layer.extend(replacement.mechanism, arrays, masks), None
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"past_key_values: {key.shape[2]} keys for {query.shape[2]} queries, from a cache that "
            f"the mechanism did not fill"
        )
    return replacement.mechanism(**arrays, **masks._asdict()), None


def _check(
    replacement: Replacement, scaling: float | None, dropout: float, others: dict[str, Given]
) -> None:
    """Raise an error for features that the mechanism lacks, and for changed options."""
    mechanism, options = replacement.mechanism, replacement.options
    if dropout:
        raise ValueError(
            f"dropout: {mechanism} has no weights to drop; set attention_dropout, or "
            f"attention_probs_dropout_prob, to 0 in the model's config; found {dropout}"
        )
    for name, expected in (("scaling", options.scale), ("softcap", options.softcap)):
        found = scaling if name == "scaling" else others.get(name)
        if found != expected:
            raise ValueError(
                f"{name}: the model had {expected} when its attention was replaced; found {found}"
            )
    if others.get("sliding_window", options.window) != options.window:
        raise ValueError(
            f"sliding_window: the model's config says {options.window} for this layer; found "
            f"{others['sliding_window']}"
        )
    if (others.get("s_aux") is not None) != options.sink:
        raise ValueError("s_aux: a sink has come or gone since the attention was replaced")
    for name in ("output_attentions", "position_bias", "head_mask", "cache"):
        if others.get(name) is not None and others[name] is not False:
            raise ValueError(f"{name}: {mechanism} has none")
    if others.get("is_causal") not in (None, options.causal):
        raise ValueError(
            f"is_causal: the mechanism is {'' if options.causal else 'not '}causal; found "
            f"{others['is_causal']}"
        )
