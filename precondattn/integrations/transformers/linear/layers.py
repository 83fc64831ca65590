"""The linear layers of a model, and other functions in place of those that they call.

A layer of Transformers calls its recurrence by name, as a function of its module. The layer gets a
`forward` of its own, the same code with other functions of these names, so that other models of the
same class stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from precondattn.integrations.transformers.interface import PreTrainedModel, force_accelerate_hooks
from precondattn.integrations.transformers.linear import gated_delta, mamba2

KINDS = {"gated_delta": gated_delta, "ssd": mamba2}
"""By mechanism, the file with the names of Transformers' functions and ours in their place."""
OTHERS = {
    "chunk_kimi_delta_attention": "a delta rule with a decay for each channel",
    "chunk_lightning_attention": "lightning attention",
}
"""Functions of other recurrences, and what they are."""


def linear_layers(model: Any) -> Iterator[tuple[nn.Module, str]]:
    """The linear layers of a model, each with its mechanism.

    Raises
    ------
    TypeError, ValueError
        for something that is no model of Transformers, and for a model without such layers.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: a PreTrainedModel of Transformers expected; found {type(model).__name__}"
        )
    found = []
    for module in model.modules():
        names = _code(module).co_names
        other = next((OTHERS[name] for name in OTHERS if name in names), None)
        if other:
            raise ValueError(
                f"model: {type(module).__name__} is {other}, which is no mechanism here"
            )
        kind = next((kind for kind, own in KINDS.items() if own.CHUNKS in names), None)
        if kind:
            found.append((module, kind))
    if not found:
        raise ValueError(
            f"model: {type(model).__name__} has no layer that calls "
            f"{' or '.join(own.CHUNKS for own in KINDS.values())}"
        )
    yield from found


def replace_functions(
    layer: nn.Module,
    functions: Mapping[str, Callable[..., Any]],
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> None:
    """Let a layer call these functions in place of those of the same names.

    `around` may put something around the layer's forward.
    """
    decorated = type(layer).forward
    own = inspect.unwrap(decorated)
    forward: Any = FunctionType(
        own.__code__,
        {**own.__globals__, **functions},
        own.__name__,
        own.__defaults__,
        own.__closure__,
    )
    forward.__kwdefaults__ = own.__kwdefaults__
    if own is not decorated:
        forward = force_accelerate_hooks("conv1d")(forward)
    set_forward(layer, forward if around is None else around(forward))


def set_forward(layer: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a layer a forward of its own, inside accelerate's hooks if it has any."""
    name = "_old_forward" if hasattr(layer, "_old_forward") else "forward"
    setattr(layer, name, MethodType(forward, layer))


def restore_functions(layer: nn.Module) -> None:
    """Give a layer the forward of its class back."""
    if hasattr(layer, "_old_forward"):
        set_forward(layer, type(layer).forward)
    else:
        vars(layer).pop("forward", None)


def _code(module: nn.Module) -> Any:
    return getattr(inspect.unwrap(type(module).forward), "__code__", _NOTHING)


_NOTHING = (lambda: None).__code__
