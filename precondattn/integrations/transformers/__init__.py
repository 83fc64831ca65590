"""Mechanisms in models of Hugging Face Transformers 5.

`interface.py` has what is used of Transformers. For a model as it is, `replace.py` and `options.py`
put a mechanism into it, `attention.py` and `masks.py` are what Transformers calls, and
`cache_layers.py` puts layers of ours into its caches: `dynamic_cache.py` and `static_cache.py`.
`model/` is a model of its own, and `linear/` computes the linear layers of existing ones.
"""

from precondattn.integrations.transformers.cache_layers import static_cache
from precondattn.integrations.transformers.linear import (
    add_ccq,
    restore_backend_for,
    use_backend_for,
)
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
    "add_ccq",
    "replace_attention",
    "restore_attention",
    "restore_backend_for",
    "static_cache",
    "use_backend_for",
]
