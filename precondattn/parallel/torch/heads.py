"""The layout `heads` for the processes of PyTorch (`heads.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from precondattn.parallel import heads
from precondattn.parallel.heads import HeadAxes, elements_sent, heads_of_output, share
from precondattn.parallel.torch.arguments import WHOLE, Bound
from precondattn.parallel.torch.call import DividedCall, MeshProcesses
from precondattn.parallel.torch.exchange import Exchange, gathered

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Mechanism


def refusal(mechanism: Mechanism, call: DividedCall, processes: MeshProcesses) -> str | None:
    """The reason why this layout can not divide a call; None if it can."""
    return heads.refusal(mechanism, call.sizes, processes.devices)


def output(call: DividedCall, processes: MeshProcesses) -> Tensor:
    """The output of this process's tokens."""
    bound, names = call.bound, call.bound.with_tokens
    moved = _exchange(call, processes).to_heads([bound.inputs[name] for name in names])
    inputs = {**_weights(bound, processes), **dict(zip(names, moved, strict=True))}
    masks = {
        name: mask if name in WHOLE else gathered(processes.group, mask, call.tokens["s"])
        for name, mask in bound.masks.items()
    }
    out = processes.together(lambda: call.mechanism(**inputs, **masks, backend=call.backend))
    (part,) = _exchange_of_output(call, processes).to_tokens([out])
    return part


def during(call: DividedCall, processes: MeshProcesses) -> str:
    """What a process has in memory during the call, in words."""
    count = call.sizes[heads_of_output(call.mechanism)] // processes.devices
    return f"all tokens of {count} heads"


def bytes_sent(call: DividedCall, processes: MeshProcesses) -> dict[str, int]:
    """The bytes that this process sends in the forward pass: of each input, and of `out`."""
    bound, of_out = call.bound, call.mechanism.program.output
    shapes = {name: tuple(bound.inputs[name].shape) for name in bound.with_tokens}
    own = {letter: counts[processes.rank] for letter, counts in call.tokens.items()}
    out, whole = of_out.shape(call.sizes | own), of_out.shape(call.sizes)
    elements = elements_sent(call.mechanism.inputs, shapes, out, whole, processes.devices)
    widths = {name: x.dtype.itemsize for name, x in bound.inputs.items()}
    widths["out"] = widths.get("v", next(iter(widths.values())))
    return {name: count * widths[name] for name, count in elements.items()}


def _exchange(call: DividedCall, processes: MeshProcesses) -> Exchange:
    """The exchange of all inputs with tokens."""
    bound, names = call.bound, call.bound.with_tokens
    axes = tuple(bound.axes[name] for name in names)
    times = tuple(bound.times(name, call.tokens) for name in names)
    counts = tuple(
        1 if axis.heads is None else bound.inputs[name].shape[axis.heads]
        for name, axis in zip(names, axes, strict=True)
    )
    return Exchange(processes, axes, times, counts)


def _exchange_of_output(call: DividedCall, processes: MeshProcesses) -> Exchange:
    pattern = call.mechanism.program.output
    whole = pattern.shape(call.sizes)
    axes = HeadAxes.of_pattern(pattern, whole)
    assert axes.time is not None  # Every output has tokens.
    times = call.tokens[pattern.letters[axes.time]]
    count = 1 if axes.heads is None else whole[axes.heads]
    return Exchange(processes, (axes,), (times,), (count,))


def _weights(bound: Bound, processes: MeshProcesses) -> dict[str, Tensor]:
    """The inputs without tokens, restricted to this process's heads."""
    result = {}
    for name, x in bound.inputs.items():
        time, axis = bound.axes[name]
        if time is None:
            result[name] = x
            if axis is not None:
                part = share(x.shape[axis], processes.devices, processes.rank)
                result[name] = x.narrow(axis, part.start, part.stop - part.start)
    return result
