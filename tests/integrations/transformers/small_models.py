"""Random models of two layers, of families whose attention differs, their prompts and logits."""

import functools

import pytest

pytest.importorskip("transformers")

import torch
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from precondattn.integrations.transformers import (
    PrecondattnCache,
    PrecondattnConfig,
    PrecondattnForCausalLM,
    replace_attention,
    static_cache,
)
from tests.layers.layer_cases import sizes_for

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FAMILIES = {
    "Llama": (LlamaConfig, {}),
    "Qwen2": (Qwen2Config, {}),
    "Qwen2, a window in one layer": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "Qwen3": (Qwen3Config, {}),
    "Mistral": (MistralConfig, {"sliding_window": 5}),
    "Gemma": (GemmaConfig, {}),
    "Gemma2": (Gemma2Config, {"sliding_window": 5, "query_pre_attn_scalar": 16}),
    "Gemma3": (
        Gemma3TextConfig,
        {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Phi": (PhiConfig, {}),
    "Phi3": (Phi3Config, {"sliding_window": 6}),
    "GptOss": (
        GptOssConfig,
        {
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "Granite": (GraniteConfig, {"attention_multiplier": 0.3}),
}


def model_of(family="Llama", dtype=torch.float32, **options):
    """A random model, the same in every call, with weights large enough for distinct logits."""
    torch.manual_seed(0)
    config_class, own = FAMILIES[family]
    config = config_class(**{**SIZES, **own, **options})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.normal_()
            elif weight.ndim > 1:
                weight.mul_(4)
    return model


OWN = {
    "vocab_size": 97,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "head_dim": 6,
}
HYBRID = ("gated_delta", "lucid")


def own_configuration(mechanism=None, **options):
    """A small configuration with the odd sizes that the layers are tested with."""
    sizes = sizes_for(mechanism) if mechanism else {}
    odd = {
        "value_head_dim": sizes.get("value_dim"),
        "num_key_value_heads": sizes.get("kv_heads"),
        "num_value_heads": sizes.get("value_heads"),
        "num_slots": sizes.get("slots"),
    }
    return PrecondattnConfig(**{**OWN, **odd, "mechanism": mechanism, **options})


def own_model(mechanism=None, dtype=torch.float32, **options):
    """A model of ours whose logits are far apart, so that a wrong cache changes the text."""
    torch.manual_seed(0)
    model = PrecondattnForCausalLM(own_configuration(mechanism, **options)).to(dtype).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(30)
    return model


def prompts():
    """Two prompts (2, 11), the second with four tokens of padding at the left, and their mask."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, SIZES["vocab_size"], (2, 11), generator=generator)
    ids[1, :4] = 0
    return ids, (ids != 0).long()


@functools.cache
def model(family, mechanism="lucid"):
    """A model that tests share, of ours or with replaced attention."""
    # The experts of GptOss have no kernel for float64.
    dtype = torch.float32 if family == "GptOss" else torch.float64
    if family != "own":
        return replace_attention(model_of(family, dtype=dtype), mechanism)
    layers = mechanism.split(" + ")
    if len(layers) == 1:
        return own_model(mechanism, dtype)
    return own_model(dtype=dtype, layer_types=layers)


def is_own(of):
    return isinstance(of, PrecondattnForCausalLM)


def cache_for(of, kind, capacity=16):
    if is_own(of):
        return PrecondattnCache(of.config, *([capacity] if kind == "static" else []))
    return DynamicCache(config=of.config) if kind == "dynamic" else static_cache(of, capacity)


def close(found, expected):
    tolerance = 1e-9 if expected.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def logits_in_parts(of, ids, mask, sizes, cache, start=0):
    """The logits of consecutive parts of a batch, the first of which begins at `start`."""
    positions, parts = (mask.cumsum(1) - 1).clamp(min=0), []
    for size in sizes:
        now = slice(start, start + size)
        given = {"attention_mask": mask[:, : now.stop], "past_key_values": cache}
        if not is_own(of):  # It knows its positions from the mask.
            given["position_ids"] = positions[:, now]
        parts.append(of(ids[:, now], **given).logits)
        start = now.stop
    return torch.cat(parts, 1)


def logits_at_once(of, ids, mask):
    given = {} if is_own(of) else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    return of(ids, attention_mask=mask, use_cache=False, **given).logits


def greedy(of, ids, mask, new=8, **options):
    return of.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)
