"""The modules of flash-linear-attention's models, and the functions that replace their kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

from precondattn.algebra.piece import BackendNames
from precondattn.integrations.transformers.interface import PreTrainedModel
from precondattn.integrations.transformers.linear.computed import (
    METHODS,
    Functions,
    Maker,
    class_of,
    code_of,
    compute_by,
    restore,
)
from precondattn.integrations.transformers.linear.fla import convolution, modules, rotary
from precondattn.integrations.transformers.linear.fla.recurrences import NAMES, recurrences

RECURRENCES = {name for names in NAMES.values() for name in names}
KERNELS: Functions = {
    "causal_conv1d": convolution.causal_conv1d,
    "causal_conv1d_update": convolution.causal_conv1d_update,
    "rotary_embedding": rotary.rotary_embedding,
    "rms_norm": modules.rms_norm,
    "rms_norm_gated": modules.rms_norm_gated,
    "rms_norm_linear": modules.rms_norm_linear,
    "swish": modules.swish,
    "swiglu": modules.swiglu,
    "swiglu_linear": modules.swiglu_linear,
}
"""The functions that replace kernels other than recurrences, in plain PyTorch."""
SERVED = (
    "GatedLinearAttention",
    "HGRN2Attention",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "DeltaNet",
    "MultiScaleRetention",
    "GatedSlotAttention",
    "LinearAttention",
)
"""The layers whose recurrence is computed here."""
LEFT = "Attention"
"""The layer of softmax attention, which a hybrid model keeps."""


def on_cpu(backend: BackendNames) -> Functions:
    """The functions that replace all kernels."""
    return {**KERNELS, **recurrences(backend)}


def is_of_fla(model: nn.Module) -> bool:
    """Whether a model is one of flash-linear-attention."""
    return str(class_of(model).__module__).startswith("fla.")


def compute_fla_by(model: nn.Module, backend: BackendNames) -> nn.Module:
    """`use_backend_for` for a model of flash-linear-attention.

    Its own loss is a kernel too: on a CPU, the attribute `criterion` that it has for another one is
    set, if it is empty.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: a PreTrainedModel of Transformers expected; found {type(model).__name__}"
        )
    for module, maker in [*modules_of_fla(model)]:
        compute_by(module, maker, backend)
        if maker is on_cpu and getattr(model, "criterion", model) is None:
            model.criterion = modules.CrossEntropy()
    return model


def restore_fla(model: nn.Module) -> nn.Module:
    """`restore_backend_for` for a model of flash-linear-attention."""
    for module in model.modules():
        if class_of(module) is not type(module):
            restore(module)
    if isinstance(getattr(model, "criterion", None), modules.CrossEntropy):
        model.criterion = None
    return model


def modules_of_fla(model: nn.Module) -> Iterator[tuple[nn.Module, Maker]]:
    """The modules to change, each with the function that makes its replacements.

    Raises
    ------
    ValueError
        for a model with none of these recurrences, and one that has others as well.
    """
    is_on_cpu = next(model.parameters()).device.type == "cpu"
    wanted = RECURRENCES | (KERNELS.keys() if is_on_cpu else set())
    called = [(module, _names(module)) for module in model.modules()]
    for module, _ in called:
        _refuse_other(module)
    if not any(names & RECURRENCES for _, names in called):
        raise ValueError(
            f"model: {type(model).__name__} has no layer of flash-linear-attention that calls one "
            f"of {', '.join(names[0] for names in NAMES.values())}"
        )
    maker = on_cpu if is_on_cpu else recurrences
    yield from ((module, maker) for module, names in called if names & wanted)


def _refuse_other(module: nn.Module) -> None:
    """Raise an error for a layer of flash-linear-attention with another recurrence."""
    cls = class_of(module)
    if not cls.__module__.startswith("fla.layers.") or cls.__name__ in (*SERVED, LEFT):
        return
    home = vars(sys.modules[cls.__module__])
    called = sorted(
        name
        for name in _names(module) - RECURRENCES - {"prepare_lens_from_mask"}
        if str(getattr(home.get(name), "__module__", "")).startswith("fla.ops")
    )
    reason = f"it calls {called[0]}" if called else "it does more than call one of our recurrences"
    raise ValueError(
        f"model: {cls.__name__} of flash-linear-attention is not supported, because {reason}; "
        f"{', '.join(SERVED)} are"
    )


def _names(module: nn.Module) -> set[str]:
    """The names that the methods of a module of flash-linear-attention use."""
    cls = class_of(module)
    if not cls.__module__.startswith("fla."):
        return set()
    return {name for method in METHODS for name in code_of(cls, method).co_names}
