"""What the launches of a method of kernels depend on, besides the entries of arrays.

dtype, shape, strides, and the address modulo 16, of every array,
the layout of the frame, and which of its arrays are given,
the current device, and the settings of kernels and of Triton
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from precondattn.frame import FULL, Frame
from precondattn.kernel_backend.precise import is_precise
from precondattn_triton.configurations import REGISTRY
from precondattn_triton.launching import is_observed, settings

Argument = Any
"""An argument of a method of kernels: arrays by name, a frame, residuals, or an array."""

Signature = tuple[Hashable, ...]

PLAIN = (Tensor, Parameter)
"""Types of arrays with an address. Those of a compiler and of PyTorch's transforms have none."""


class IndescribableError(Exception):
    """An argument has something that a signature does not describe."""


def signature_of(arguments: tuple[Argument, ...]) -> tuple[Signature, list[Tensor]] | None:
    """The signature of a call, and its arrays; None if it can not be repeated."""
    if any(map(_counts_tokens, arguments)) or is_observed() or _is_transformed():
        return None
    inputs: list[Tensor] = []
    signature: list[Hashable] = [settings(), is_precise(), REGISTRY.choices]
    try:
        for argument in arguments:
            _describe(argument, signature, inputs)
    except IndescribableError:
        return None
    if not inputs:
        return None
    return (inputs[0].device, *signature), inputs


def _counts_tokens(argument: Argument) -> bool:
    """Whether an argument is the frame of a step after a known number of tokens.

    The number is different in every step, so that no signature would occur twice.
    """
    if type(argument) is not Frame:
        return False
    return argument.held is not None or argument.longest is not None


def _is_transformed() -> bool:
    """Whether something looks at PyTorch's operators, or a transform runs."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _describe(argument: Argument, signature: list[Hashable], inputs: list[Tensor]) -> None:
    kind = type(argument)
    if kind in PLAIN:
        inputs.append(argument)
        described = argument.dtype, argument.shape, argument.stride(), argument.data_ptr() % 16
        signature.append(described)
    elif argument is None or kind in (int, float, bool, str):
        signature.append(argument)
    elif kind is dict:
        for name, each in argument.items():
            signature.append(name)
            if type(each) is Tensor:  # Almost all are: no function is called for each.
                inputs.append(each)
                signature.append((each.dtype, each.shape, each.stride(), each.data_ptr() % 16))
            else:
                _describe(each, signature, inputs)
    elif isinstance(argument, tuple):
        signature.append((kind, len(argument)))
        for each in argument:
            _describe(each, signature, inputs)
    elif kind is Frame:
        _describe_frame(argument, signature, inputs)
    else:
        raise IndescribableError


def _describe_frame(frame: Frame, signature: list[Hashable], inputs: list[Tensor]) -> None:
    """The layout of a frame, and the arrays from which its other arrays are computed."""
    layout = frame.layout
    signature += [layout, frame.may_overwrite]
    for name, each in vars(frame).items():
        # A full call reads the device of `_like` only, which is that of an input.
        if each is None or (name == "_like" and layout.kind == FULL):
            continue
        if type(each) in PLAIN or name == "_masks":
            signature.append(name)
            _describe(dict(each) if name == "_masks" else each, signature, inputs)
