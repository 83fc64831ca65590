"""The names of Hugging Face Transformers that this integration uses.

The other files import these names from here, so that a version of Transformers that moves one of
them fails once, at import, and says what is missing.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

TRIED = ("5.19.0", "5.22.2", "5.23.0")
"""The versions with which the tests have passed."""

USED = {
    "huggingface_hub.dataclasses": ("strict",),
    "transformers": (
        "AutoConfig",
        "AutoModel",
        "AutoModelForCausalLM",
        "GenerationMixin",
        "PreTrainedConfig",
        "PreTrainedModel",
    ),
    "transformers.cache_utils": (
        "Cache",
        "CacheLayerMixin",
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "StaticLayer",
        "StaticSlidingWindowLayer",
    ),
    "transformers.masking_utils": (
        "ALL_MASK_ATTENTION_FUNCTIONS",
        "and_masks",
        "bidirectional_mask_function",
        "causal_mask_function",
        "packed_sequence_mask_function",
        "sdpa_mask",
        "sliding_window_overlay",
    ),
    "transformers.modeling_layers": ("GradientCheckpointingLayer",),
    "transformers.modeling_outputs": ("BaseModelOutputWithPast", "CausalLMOutputWithPast"),
    "transformers.modeling_utils": ("ALL_ATTENTION_FUNCTIONS",),
    "transformers.utils": ("can_return_tuple",),
    "transformers.utils.output_capturing": ("capture_outputs",),
}
"""The used names, by module."""

PARAMETERS = {
    "sdpa_mask": ("q_length", "kv_length", "q_offset", "kv_offset", "allow_is_causal_skip"),
    "GenerationMixin._prepare_cache_for_generation": (
        "generation_config",
        "model_kwargs",
        "generation_mode",
        "batch_size",
        "max_cache_length",
    ),
}
"""The parameters that functions and methods must have, because ours replace them."""

ABSTRACT = {
    "CacheLayerMixin": {
        "get_mask_sizes",
        "get_max_length",
        "get_seq_length",
        "lazy_initialization",
        "update",
    },
}
"""The abstract methods that our subclass of a class implements."""


OfTransformers = Any
"""A class or a function of Transformers."""
HFConfig = Any
"""A configuration of Transformers."""


def _load() -> dict[str, OfTransformers]:
    """The used objects by name; raises an ImportError that lists missing names."""
    try:
        version = importlib.import_module("transformers").__version__
    except ImportError as error:
        raise ImportError(
            "precondattn.integrations.transformers needs Hugging Face Transformers: "
            "pip install 'precondattn[transformers]'"
        ) from error
    found, missing = {}, []
    for module_name, names in USED.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            missing.append(module_name)
            continue
        for name in names:
            if hasattr(module, name):
                found[name] = getattr(module, name)
            else:
                missing.append(f"{module_name}.{name}")
    for name, wanted in PARAMETERS.items():
        owner, _, method = name.partition(".")
        if owner in found:
            function = getattr(found[owner], method, None) if method else found[owner]
            has = inspect.signature(function).parameters if function else ()
            missing += [f"parameter {p} of {name}" for p in wanted if p not in has]
    for name, methods in ABSTRACT.items():
        if name in found:
            others = sorted(found[name].__abstractmethods__ - methods)
            missing += [f"{name} without the abstract method {other}" for other in others]
    if missing:
        raise ImportError(
            f"precondattn.integrations.transformers was tried with Transformers "
            f"{', '.join(TRIED)}; version {version} has no {', no '.join(missing)}"
        )
    return found


_found = _load()

remap_positions_for_packed_sequence = getattr(
    importlib.import_module("transformers.masking_utils"),
    "remap_positions_for_packed_sequence",
    None,
)
"""The second description of packed sequences, from 5.23 on."""


def __getattr__(name: str) -> OfTransformers:
    """The used object of this name."""
    if name not in _found:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _found[name]
