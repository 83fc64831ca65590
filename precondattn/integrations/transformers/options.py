"""Giving a mechanism the options of a model's attention: scale, window, soft cap, sink, causality.

They are options of plain softmax, which is the base of every mechanism that can replace it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from precondattn.algebra.mechanism import Mechanism
from precondattn.algebra.options import OptionValue
from precondattn.given import Given
from precondattn.spec.softmax import Softmax


class AttentionOptions(NamedTuple):
    """The options of a model's attention."""

    scale: float | None
    window: int | None
    softcap: float | None
    sink: bool
    causal: bool = True


def options_of(module: nn.Module, config: Given, index: int) -> AttentionOptions:
    """The options of one attention module."""
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if types is not None and types[index] == "full_attention":
        window = None
    return AttentionOptions(
        getattr(module, "scaling", None),
        window,
        getattr(module, "attn_logit_softcapping", None),
        getattr(module, "sinks", None) is not None,
        bool(getattr(module, "is_causal", True) and getattr(config, "is_causal", True)),
    )


def with_options(mechanism: Mechanism, options: AttentionOptions) -> Mechanism:
    """The mechanism with these options in its base."""
    base = getattr(mechanism, "base", None)
    if base is not None:
        return replace(mechanism, base=with_options(base, options))
    if type(mechanism) is not Softmax:
        raise TypeError(
            f"{mechanism} is not softmax; what can take the place of a model's softmax are softmax "
            f"and its preconditioners, such as 'lucid' or 'lucid(laser)'"
        )
    if options.causal and not mechanism.causal:
        raise ValueError(f"{mechanism}: the model is causal, and the mechanism is not")
    if not options.causal and options.window is not None:
        raise ValueError(
            f"sliding_window: the model is an encoder with a window of {options.window}, whose "
            f"sides no mechanism here counts as it does"
        )
    return replace(
        mechanism,
        causal=options.causal,
        scale=_one("scale", mechanism.scale, options.scale),
        window=_one("window", mechanism.window, options.window),
        softcap=_one("softcap", mechanism.softcap, options.softcap),
        sink=mechanism.sink or options.sink,
    )


def _one(name: str, of_mechanism: OptionValue, of_model: OptionValue) -> OptionValue:
    """The option of the mechanism or of the model, whichever has it."""
    if of_mechanism is None or of_model is None or math.isclose(of_mechanism, of_model):
        return of_model if of_mechanism is None else of_mechanism
    raise ValueError(f"{name}: the mechanism has {of_mechanism}, and the model {of_model}")
