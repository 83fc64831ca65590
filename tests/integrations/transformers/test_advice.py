"""A refusal in a model of Transformers that says what to do instead is right: that works."""

import re
from typing import NamedTuple

import pytest

pytest.importorskip("transformers")

import torch
from transformers import DynamicCache, StaticCache

from precondattn.integrations.transformers import replace_attention, static_cache
from precondattn.integrations.transformers.attention import NAME
from tests.integrations.transformers.small_models import model_of, prompts

IDS, MASK = prompts()


class ModelAdvice(NamedTuple):
    """A refused call, what its message advises, and the call that does that."""

    says: str
    refused: object
    advised: object


def ours(mechanism="lucid", family="Llama", **options):
    return replace_attention(model_of(family, **options), mechanism)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def whole(model):
    return model(IDS, use_cache=False).logits


def after(model, cache, ids=IDS, **options):
    return model(ids, past_key_values=cache, **options).logits


def filled(model, mask=None):
    cache = DynamicCache()
    model(IDS[:, :8], attention_mask=mask, past_key_values=cache)
    return cache


def with_the_same_mask(appended):
    """The last three tokens after a prompt with padding at the left."""
    model = ours()
    cache = filled(model, MASK[:, :8])
    mask = MASK if appended else torch.ones_like(MASK)
    positions = (MASK.cumsum(1) - 1).clamp(min=0)[:, 8:]
    return after(model, cache, IDS[:, 8:], attention_mask=mask, position_ids=positions)


def cropped(recorded):
    model, cache = ours("softmax", family="Mistral"), DynamicCache()
    model(IDS[:, :8], past_key_values=cache)
    if recorded:
        cache.activate_past_recording()
    model(IDS[:, 8:], past_key_values=cache)
    cache.crop(-3)
    close(after(model, cache, IDS[:, 8:]), whole(model)[:, 8:])


def static_window(**options):
    model = ours(family="Mistral")
    if options.pop("advised", False):
        options["past_key_values"] = static_cache(model, 24)
    return model.generate(IDS, max_new_tokens=2, do_sample=False, **options)


def offloaded(is_offloaded):
    model = ours()
    cache = DynamicCache(config=model.config)
    cache.offloading = is_offloaded
    close(after(model, cache), whole(model))


def kept_from_before():
    model = model_of()
    return replace_attention(model, "lucid"), filled(model_of())


def in_training(**options):
    return ours(**options).train()(IDS, use_cache=False)


def by_name_only(model):
    model.set_attn_implementation(NAME)
    return model(IDS)


ADVICE = [
    ModelAdvice(
        "set attention_dropout, or attention_probs_dropout_prob, to 0 in the model's config",
        lambda: in_training(attention_dropout=0.1),
        lambda: in_training(attention_dropout=0.0),
    ),
    ModelAdvice(
        "call replace_attention(model, ...)",
        lambda: by_name_only(model_of()),
        lambda: whole(replace_attention(model_of(), "lucid")),
    ),
    ModelAdvice("use one without offloading", lambda: offloaded(True), lambda: offloaded(False)),
    ModelAdvice(
        "begin with an empty one after replace_attention",
        lambda: after(*kept_from_before()),
        lambda: close(after(ours(), DynamicCache()), whole(ours())),
    ),
    ModelAdvice(
        "call activate_past_recording() before the tokens that may be removed",
        lambda: cropped(False),
        lambda: cropped(True),
    ),
    ModelAdvice(
        "pass the same mask with columns for the new tokens appended",
        lambda: with_the_same_mask(False),
        lambda: with_the_same_mask(True),
    ),
    ModelAdvice(
        "pass past_key_values=static_cache(model, max_cache_len)",
        lambda: static_window(cache_implementation="static"),
        lambda: static_window(advised=True),
    ),
    ModelAdvice(
        "such as 'lucid' or 'lucid(laser)'",
        lambda: ours("linear"),
        lambda: [ours("lucid"), ours("lucid(laser)")],
    ),
]


@pytest.mark.parametrize("advice", ADVICE, ids=[advice.says for advice in ADVICE])
@torch.no_grad()
def test_a_call_that_a_refusal_advises_works(advice):
    with pytest.raises((TypeError, ValueError), match=re.escape(advice.says)):
        advice.refused()
    advice.advised()


def test_a_static_cache_without_gradients_and_a_dynamic_one_with_them_work():
    model = ours()
    with pytest.raises(ValueError, match=r"use a DynamicCache, or torch.no_grad\(\)"):
        after(model, static_cache(model, 16))
    after(model, DynamicCache()).sum().backward()
    with torch.no_grad():
        close(after(model, StaticCache(model.config, max_cache_len=16)), whole(model))
