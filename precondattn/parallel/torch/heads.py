"""The layout `heads` for the processes of PyTorch (`heads.py`)."""

from __future__ import annotations

from torch import Tensor

from precondattn.parallel.heads import HeadAxes, share
from precondattn.parallel.torch.arguments import WHOLE, Bound
from precondattn.parallel.torch.call import DividedCall
from precondattn.parallel.torch.exchange import Exchange, gathered
from precondattn.parallel.torch.processes import MeshProcesses


def output(call: DividedCall) -> Tensor:
    """The output of this process's tokens."""
    bound, names, processes = call.bound, call.bound.with_tokens, call.processes
    moved = {name: _exchange(call, name).to_heads(bound.inputs[name]) for name in names}
    inputs = {**_weights(bound, processes), **moved}
    masks = {
        name: mask if name in WHOLE else gathered(processes.group, mask, call.tokens["s"])
        for name, mask in bound.masks.items()
    }
    out = processes.together(lambda: call.mechanism(**inputs, **masks, backend=call.backend))
    return _exchange_of_output(call).to_tokens(out)


def _exchange(call: DividedCall, name: str) -> Exchange:
    """The exchange of an input with tokens."""
    axes = call.axes[name]
    count = 1 if axes.heads is None else call.bound.inputs[name].shape[axes.heads]
    return Exchange(call.processes, axes, call.bound.times(name, call.tokens), count)


def _exchange_of_output(call: DividedCall) -> Exchange:
    pattern = call.mechanism.program.output
    whole = pattern.shape(call.sizes)
    axes = HeadAxes.of_pattern(pattern, whole)
    assert axes.time is not None  # Every output has tokens.
    times = call.tokens[pattern.letters[axes.time]]
    count = 1 if axes.heads is None else whole[axes.heads]
    return Exchange(call.processes, axes, times, count)


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
