"""Checks of masks before each call of a model: Transformers converts other numbers to booleans."""

from __future__ import annotations

import torch
from torch import Tensor

from precondattn.given import Given

HANDLE = "precondattn_checked_masks"
"""The attribute of a model with the handle of its check."""


def check_masks(model: Given, is_checked: bool = True) -> None:
    """Check the masks of a model's calls from now on, or no longer."""
    if handle := model.__dict__.pop(HANDLE, None):
        handle.remove()
    if is_checked:
        setattr(model, HANDLE, model.register_forward_pre_hook(_check, with_kwargs=True))


def _check(model: Given, args: tuple[Given, ...], kwargs: Given) -> None:
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        check_numbers(mask)


def check_numbers(mask: Tensor) -> None:
    """Raise an error for a mask (b, s) with floating-point numbers other than 0 and 1.

    In compiled code the device raises it.
    """
    if not mask.is_floating_point():
        return
    message = "attention_mask (b, s) must have 1 for tokens and 0 for padding; found others"
    are_valid = ((mask == 0) | (mask == 1)).all()
    if torch.compiler.is_compiling():
        torch._assert_async(are_valid, message)
    elif not are_valid:
        raise ValueError(message)
