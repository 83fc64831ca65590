"""The linear layers of a model, found by the names of the functions that they call."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from precondattn.integrations.transformers.interface import PreTrainedModel
from precondattn.integrations.transformers.linear import gated_delta, kda, mamba2
from precondattn.integrations.transformers.linear.computed import class_of, code_of

KINDS = {"gated_delta": gated_delta, "kda": kda, "ssd": mamba2}
"""The file for each mechanism that has the names of Transformers' functions, and ours in their
place. The list is written by hand: it has what models of Transformers have."""


def linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
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
        names = code_of(class_of(module), "forward").co_names
        kind = next((kind for kind, own in KINDS.items() if own.CHUNKS in names), None)
        if kind:
            found.append((module, kind))
    if not found:
        raise ValueError(
            f"model: {type(model).__name__} has no layer that calls "
            f"{' or '.join(own.CHUNKS for own in KINDS.values())}"
        )
    yield from found
