"""Random models of two layers, of families whose attention differs, and their prompts."""

import pytest

pytest.importorskip("transformers")

import torch
from transformers import (
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
TYPES = ["sliding_attention", "full_attention"]

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
    "Gemma3": (Gemma3TextConfig, {"sliding_window": 5, "layer_types": TYPES}),
    "Phi": (PhiConfig, {}),
    "Phi3": (Phi3Config, {"sliding_window": 6}),
    "GptOss": (
        GptOssConfig,
        {
            "sliding_window": 5,
            "layer_types": TYPES,
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


def prompts():
    """Two prompts (2, 11), the second with four tokens of padding at the left, and their mask."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, SIZES["vocab_size"], (2, 11), generator=generator)
    ids[1, :4] = 0
    return ids, (ids != 0).long()
