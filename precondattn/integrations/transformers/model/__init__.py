"""A model class for Transformers, registered with its Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from precondattn.integrations.transformers.model.cache import PrecondattnCache
from precondattn.integrations.transformers.model.configuration import PrecondattnConfig
from precondattn.integrations.transformers.model.modeling import (
    PrecondattnForCausalLM,
    PrecondattnModel,
    PrecondattnPreTrainedModel,
)

AutoConfig.register(PrecondattnConfig.model_type, PrecondattnConfig, exist_ok=True)
AutoModel.register(PrecondattnConfig, PrecondattnModel, exist_ok=True)
AutoModelForCausalLM.register(PrecondattnConfig, PrecondattnForCausalLM, exist_ok=True)

__all__ = [
    "PrecondattnCache",
    "PrecondattnConfig",
    "PrecondattnForCausalLM",
    "PrecondattnModel",
    "PrecondattnPreTrainedModel",
]
