"""PyTorch: which calls run as operators, or as autograd functions, and which directly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

from torch import Tensor

from precondattn.arrays import is_ordinary, transforms_of, wants_gradient
from precondattn.dispatch.discovery import REFERENCE
from precondattn.dispatch.plan import PlannedCall
from precondattn.execution.arguments import BoundCall
from precondattn.execution.array_checks import values_of
from precondattn.frameworks.torch import autograd, recorded
from precondattn.frameworks.torch.modes import counts_flops
from precondattn.frameworks.types import Step


def bridge(planned: PlannedCall, call: BoundCall) -> Callable[..., Tensor] | None:
    """The function that runs a call and registers its gradient with autograd; None if none."""
    is_differentiable = planned.runner.differentiable
    if is_ordinary(values_of(call.inputs)):
        return None
    if call.prepared.is_recorded:
        return None if is_differentiable else recorded.apply
    if not is_differentiable or _is_counted(planned, call):
        return autograd.apply
    return None


def _is_counted(planned: PlannedCall, call: BoundCall) -> bool:
    """Whether a differentiable call must be an operator, so that PyTorch counts its FLOPs.

    Transforms can not use operators, and an operator needs a gradient other than autograd's.
    """
    is_possible = not transforms_of(*call.inputs.values())
    return is_possible and counts_flops() and not _is_by_autograd(planned, "backward")


def bridge_of_step(
    call: BoundCall, length: Tensor, planned: PlannedCall, *arrays: Tensor
) -> Step | None:
    """Like `bridge`, for a step with these buffers and inputs."""
    if is_ordinary(length):
        return None
    if wants_gradient(*arrays):
        return None if planned.runner.differentiable else autograd.apply_step
    is_operator = (planned.is_symbolic or counts_flops()) and not transforms_of(*arrays)
    if not is_operator and planned.backend is not REFERENCE:
        is_operator = mapped_operators(planned, "step_backward", *arrays) is not None
    if not is_operator:
        return None
    return partial(autograd.apply_extension, length=length, count=call.count)


def mapped_operators(planned: PlannedCall, gradient: str, *arrays: Tensor) -> ModuleType | None:
    """The module of operators that `torch.vmap` maps; None outside `torch.vmap`.

    It needs none for calls whose gradient is autograd's.
    """
    if transforms_of(*arrays) != {"vmap"} or _is_by_autograd(planned, gradient):
        return None
    return autograd


def _is_by_autograd(planned: PlannedCall, gradient: str) -> bool:
    """Whether autograd computes this gradient, which is a method of other backends."""
    return gradient in planned.runner.by_autograd
