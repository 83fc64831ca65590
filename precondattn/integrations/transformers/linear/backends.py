"""`use_backend_for`: the linear layers of a model of Transformers, computed by this library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from precondattn.integrations.transformers.checked_calls import STATES, check_calls
from precondattn.integrations.transformers.linear.computed import compute_by, restore
from precondattn.integrations.transformers.linear.fla.layers import (
    compute_fla_by,
    is_of_fla,
    restore_fla,
)
from precondattn.integrations.transformers.linear.layers import KINDS, linear_layers
from precondattn.integrations.transformers.linear.state_padding import checked

if TYPE_CHECKING:
    from torch import nn


def use_backend_for(model: nn.Module, backend: str | tuple[str, ...] | None = None) -> nn.Module:
    """Make this library compute the recurrences of a model's linear layers.

    Weights, convolutions and caches stay those of Transformers. The outputs are equal up to
    rounding, 1e-5 in float32. Tokens that follow padding in the middle of a sequence raise an
    error, for example after a prompt that is padded on the right, because Transformers' caches give
    wrong logits for them.

    Parameters
    ----------
    model : PreTrainedModel
        A model with gated delta layers (Qwen3-Next, Qwen3.5, OLMo-hybrid), Kimi Delta Attention
        (Kimi-Linear, Bailing's hybrids) or Mamba-2's layers (Mamba-2, Bamba, Falcon-H1, Granite's
        hybrids, Zamba-2), or one of flash-linear-attention's (GLA, HGRN2, GatedDeltaNet, DeltaNet,
        KDA, RetNet, GSA, LinearAttention). It is changed in place; others of its class are not.
    backend : str or tuple of str, optional
        The backends to use, as in a call of a mechanism; all installed ones by default.

    Returns
    -------
    PreTrainedModel
        The same model.

    Raises
    ------
    TypeError, ValueError
        for a model without such layers, for a model changed by `add_ccq`, and for layers of
        flash-linear-attention with another recurrence.

    Examples
    --------
    >>> from transformers import Mamba2Config, Mamba2ForCausalLM
    >>> from precondattn.integrations.transformers import use_backend_for
    >>> config = Mamba2Config(
    ...     vocab_size=64, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8,
    ...     state_size=8, n_groups=2,
    ... )
    >>> model = use_backend_for(Mamba2ForCausalLM(config))
    """
    if is_of_fla(model):
        return compute_fla_by(model, backend)
    layers = [*linear_layers(model)]
    if any(hasattr(layer, "contraction_gate") for layer, _ in layers):
        raise ValueError("model: it has ccq; pass the backend to add_ccq")
    for layer, kind in layers:
        compute_by(layer, KINDS[kind].functions, backend, checked)
    check_calls(model, STATES)
    return model


def restore_backend_for(model: nn.Module) -> nn.Module:
    """Restore Transformers' own functions in a model's linear layers, and remove gates of CCQ."""
    if is_of_fla(model):
        return restore_fla(model)
    check_calls(model, STATES, False)
    for layer, _ in [*linear_layers(model)]:
        restore(layer)
        if hasattr(layer, "contraction_gate"):
            del layer.contraction_gate
    return model
