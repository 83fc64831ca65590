"""PyTorch's operator `scan`, which is a single node of a graph for any number of steps.

An exported program has it in place of a loop over tokens; in ONNX it is a `Scan`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from precondattn.frameworks.types import Step

TIME = 2


def scan(
    step: Step, state: Tensor, inputs: tuple[Tensor, ...], *, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """The last state, and the outputs along axis 2, of `state, output = step(state, token)`."""
    time_first = [x.movedim(TIME, 0) for x in inputs]
    if reverse:
        time_first = [x.flip(0) for x in time_first]
    state, outputs = steps(step, state, time_first, or_none=True)
    return state, (outputs.flip(0) if reverse else outputs).movedim(0, TIME)


def linear_scan(factor: Tensor, value: Tensor, times: Step, plus: Step) -> Tensor:
    """The recurrence y_t = factor_t ⊗ y_{t−1} ⊕ value_t along the last axis, from value_0."""

    def step(y: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        y = plus(times(token[0], y), token[1])
        return y, y

    factor, value = (_one_more(array.movedim(-1, 0)) for array in (factor, value))
    _, outputs = steps(step, value[0], [factor[1:], value[1:]], or_none=True)
    outputs = torch.cat([value[:1], outputs])
    return outputs.narrow(0, 0, outputs.shape[0] - 1).movedim(0, -1)


def running_maximum(array: Tensor, axis: int) -> Tensor:
    """The cumulative maximum along an axis."""

    def step(largest: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        largest = torch.maximum(largest, token[0])
        return largest, largest

    along = array.movedim(axis, 0)
    return steps(step, _one_more(along)[0], [along], or_none=True)[1].movedim(0, axis)


def steps(
    step: Step, state: Tensor, inputs: Sequence[Tensor], *, or_none: bool = False
) -> tuple[Tensor, Tensor]:
    """The last state, and the outputs along axis 0, of steps over axis 0 of the inputs."""
    count = inputs[0].shape[0]
    or_none = or_none and not isinstance(count, int)
    if or_none:
        step_number = torch.arange(count + 1, device=state.device)
        inputs = [*map(_one_more, inputs), step_number < count]

    def flat(state: Tensor, *token: Tensor) -> list[Tensor]:
        new, output = step(state, token[:-1] if or_none else token)
        new = torch.where(token[-1], new, state) if or_none else new
        return [_laid_out(new), _laid_out(output)]

    from torch._higher_order_ops.scan import scan_op  # Slow to import.

    state, outputs = scan_op(flat, [_laid_out(state)], [*inputs], ())
    return state, outputs[:-1] if or_none else outputs


def _one_more(array: Tensor) -> Tensor:
    """The array with one more entry along axis 0."""
    return torch.cat([array, array.new_zeros(1, *array.shape[1:])])


def _laid_out(array: Tensor) -> Tensor:
    """A copy in row-major order.

    The operator refuses results that share memory, and states whose strides change, even the
    stride of an axis of length 1.
    """
    return array.clone(memory_format=torch.contiguous_format)
