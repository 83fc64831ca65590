"""Mechanisms in models of Hugging Face Transformers 5.

For existing models, `replace.py` replaces the softmax by a mechanism, `attention.py` and `masks.py`
have the functions that Transformers calls, and `cache_layers.py` puts our layers
(`dynamic_cache.py`, `static_cache.py`) into its caches. `model/` is a new model class.
"""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "precondattn.integrations.transformers needs Hugging Face Transformers: "
        "pip install 'precondattn[transformers]'"
    ) from error

from precondattn.integrations.transformers.cache_layers import static_cache
from precondattn.integrations.transformers.model import (
    PrecondattnCache,
    PrecondattnConfig,
    PrecondattnForCausalLM,
    PrecondattnModel,
)
from precondattn.integrations.transformers.replace import replace_attention, restore_attention

__all__ = [
    "PrecondattnCache",
    "PrecondattnConfig",
    "PrecondattnForCausalLM",
    "PrecondattnModel",
    "replace_attention",
    "restore_attention",
    "static_cache",
]
