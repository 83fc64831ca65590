"""Putting our layers into a cache of Transformers, in place of its own layers."""

from __future__ import annotations

from torch import nn
from transformers.cache_utils import Cache as HFCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from precondattn.given import Given
from precondattn.integrations.transformers.cache import NOT_OFFLOADED, PREFIX_TUNING
from precondattn.integrations.transformers.dynamic_cache import DynamicCacheLayer
from precondattn.integrations.transformers.static_cache import StaticCacheLayer

OURS = (DynamicCacheLayer, StaticCacheLayer)


def layer_for(cache: Given, index: int) -> DynamicCacheLayer | StaticCacheLayer:
    """The layer of a cache at an index; an empty layer of Transformers is replaced by ours."""
    if not isinstance(cache, HFCache) or not hasattr(cache, "layers"):
        raise TypeError(
            f"past_key_values: a DynamicCache or a StaticCache expected; found "
            f"{type(cache).__name__}"
        )
    if cache.offloading:
        raise TypeError(NOT_OFFLOADED)
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if not isinstance(layer, OURS):
        first_layer = next((each for each in cache.layers if isinstance(each, OURS)), None)
        layer = cache.layers[index] = _ours(layer, cache)
        layer.first_layer = first_layer
    return layer


def _ours(layer: Given, cache: Given) -> DynamicCacheLayer | StaticCacheLayer:
    """An empty layer of ours for the same use as a layer of Transformers."""
    if layer.is_initialized and layer.get_seq_length() > 0:
        raise ValueError(
            "past_key_values: this cache holds keys and values of another attention; begin with an "
            f"empty one after replace_attention ({PREFIX_TUNING})"
        )
    kind = type(layer)
    if kind in (DynamicLayer, DynamicSlidingWindowLayer):
        return DynamicCacheLayer(getattr(layer, "record_past", False))
    if kind is StaticLayer:
        return StaticCacheLayer(layer.max_cache_len)
    if kind is StaticSlidingWindowLayer:
        return StaticCacheLayer(_capacity(layer, cache))
    raise TypeError(
        f"past_key_values: a layer of DynamicCache or StaticCache expected; found {kind.__name__}, "
        f"whose copies of keys and values (quantised ones, say) a mechanism can not use"
    )


def _capacity(layer: Given, cache: Given) -> int | None:
    """The number of tokens for which a static cache was created.

    A layer with a window knows this number only if it is below the window.
    """
    whole = [
        other.max_cache_len
        for other in cache.layers
        if type(other) is StaticLayer or isinstance(other, StaticCacheLayer)
    ]
    return max((length for length in whole if length is not None), default=None)


def static_cache(model: nn.Module, max_cache_len: int) -> Given:
    """A static cache for a model whose attention was replaced: `past_key_values=` of `generate`.

    Parameters
    ----------
    model : PreTrainedModel
    max_cache_len : int
        The number of tokens, padding included, that fit.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    layers = [StaticCacheLayer(max_cache_len) for _ in range(count)]
    for layer in layers[1:]:
        layer.first_layer = layers[0]
    return HFCache(layers=layers)
