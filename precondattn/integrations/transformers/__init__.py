"""Mechanisms in models of Hugging Face Transformers 5."""

from precondattn.integrations.transformers import interface as interface
from precondattn.integrations.transformers.model import (
    PrecondattnCache,
    PrecondattnConfig,
    PrecondattnForCausalLM,
    PrecondattnModel,
)

__all__ = ["PrecondattnCache", "PrecondattnConfig", "PrecondattnForCausalLM", "PrecondattnModel"]
