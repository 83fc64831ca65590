"""PyTorch's autograd: a planned call as custom operators with a gradient.

`operators.py` has the operators, `derivatives.py` their gradients, and `vmap.py` their rule for
vmap. Calls under transforms for which operators have no rule (torch.func.grad, forward-mode
differentiation) run on the reference.
"""

from __future__ import annotations

from torch import Tensor

from precondattn.arrays import Array, Arrays, Residuals, Tree, wants_gradient
from precondattn.cache import Replace, Updates
from precondattn.dispatch.plan import PlannedCall
from precondattn.frame import Frame
from precondattn.frameworks.torch import operators, vmap  # noqa: F401
from precondattn.frameworks.torch.derivatives import register_flops
from precondattn.frameworks.torch.frames import text_of


def apply(planned: PlannedCall, inputs: Arrays, frame: Frame) -> Tensor:
    """The output of a planned call, differentiable with respect to its inputs."""
    if wants_gradient(*inputs.values()):
        return _called(operators.forward, planned, frame, [inputs])[0]
    return _called(operators.inference, planned, frame, [inputs])


def apply_step(
    planned: PlannedCall, past: Arrays, inputs: Arrays, frame: Frame
) -> tuple[Tensor, Updates]:
    """A step that replaces states, differentiable with respect to the states and the inputs."""
    out, *new = _called(operators.step, planned, frame, [past, inputs])
    return out, {name: Replace(state) for name, state in zip(past, new, strict=True)}


def apply_extension(
    planned: PlannedCall, past: Arrays, inputs: Arrays, frame: Frame, length: Tensor, count: Array
) -> tuple[Tensor, Updates]:
    """A step as one operator without gradient, which returns the whole updated buffers."""
    counts = count if isinstance(count, Tensor) else length.new_full(length.shape, count)
    out, *new = _called(operators.extension, planned, frame, [past, inputs], length, counts)
    return out, {name: Replace(buffer) for name, buffer in zip(past, new, strict=True)}


def with_residuals(planned: PlannedCall, inputs: Arrays, frame: Frame) -> tuple[Tensor, Residuals]:
    """The output of a planned call, and the residuals, under vmap."""
    out, *residuals = _called(operators.forward, planned, frame, [inputs])
    return out, tuple(residuals)


def gradients(
    planned: PlannedCall, inputs: Arrays, frame: Frame, out: Tensor, residuals: Tree, d_out: Tensor
) -> Arrays:
    """The gradients of a planned call, under vmap, or of a call without operators."""
    if planned.runner.differentiable:  # PyTorch's functions save their own residuals.
        out, residuals = with_residuals(planned, inputs, frame)
    found = _called(operators.backward, planned, frame, [inputs], [out, *residuals], d_out)
    return dict(zip(inputs, found, strict=True))


def step_gradients(
    planned: PlannedCall, past: Arrays, inputs: Arrays, frame: Frame, d_out: Tensor, d_new: Arrays
) -> tuple[Arrays, Arrays]:
    """The gradients of a step with respect to its inputs and the old states, under vmap."""
    cotangents = [d_out, *(d_new[name] for name in past)]
    found = _called(operators.step_backward, planned, frame, [past, inputs], cotangents)
    d_past, d_inputs = found[: len(past)], found[len(past) :]
    return dict(zip(inputs, d_inputs, strict=True)), dict(zip(past, d_past, strict=True))


def _called(
    operator: Tree, planned: PlannedCall, frame: Frame, arrays: list[Arrays], *others: Tree
) -> Tree:
    """The results of an operator on lists of arrays, a frame, and other arguments."""
    register_flops()
    lists = [list(each.values()) for each in arrays]
    masks, layout = list(frame.sources), text_of(frame.layout)
    return operator(planned.piece._name, planned.backend.name, *lists, masks, *others, layout)
