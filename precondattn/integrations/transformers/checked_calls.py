"""Checks before each call of a model, of what Transformers converts or ignores without an error."""

from functools import partial

import torch
from torch import Tensor

from precondattn.given import Given

MASKS, STATES = "precondattn_checked_masks", "precondattn_checked_states"
"""The attributes of a model with the handles of the checks."""
SINGLE = "attention_mask: Transformers tells no linear layer that a single token is padding"


def check_calls(model: Given, name: str, is_checked: bool = True) -> None:
    """Check a model's calls from now on, or no longer."""
    if handle := model.__dict__.pop(name, None):
        handle.remove()
    if is_checked:
        check = partial(_check, name == STATES)
        setattr(model, name, model.register_forward_pre_hook(check, with_kwargs=True))


def _check(has_states: bool, model: Given, args: tuple[Given, ...], kwargs: Given) -> None:
    if model.config.model_type == "mamba2" and kwargs.get("past_key_values") is not None:
        raise ValueError("past_key_values: Mamba-2 ignores it; pass the cache as cache_params")
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return
    check_numbers(mask)
    tokens = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    if has_states and any(x is not None and x.shape[1] == 1 for x in tokens):
        require(mask[:, -1].all(), SINGLE)


def check_numbers(mask: Tensor) -> None:
    """Raise an error for a mask (b, s) with floating-point numbers other than 0 and 1."""
    if mask.is_floating_point():
        message = "attention_mask (b, s) must have 1 for tokens and 0 for padding; found others"
        require(((mask == 0) | (mask == 1)).all(), message)


def require(condition: Tensor, message: str) -> None:
    """Raise an error unless the condition holds; on the device in compiled code."""
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(message)
