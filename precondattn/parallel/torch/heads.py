"""The layout `heads` for the processes of PyTorch (`heads.py`)."""

from __future__ import annotations

from torch import Tensor

from precondattn.algebra.declaration import Pattern
from precondattn.arrays import Shape
from precondattn.parallel.heads import HeadAxes, share
from precondattn.parallel.torch.arguments import WHOLE
from precondattn.parallel.torch.call import DividedCall
from precondattn.parallel.torch.exchange import Exchange, gathered


def output(call: DividedCall) -> Tensor:
    """The output of this process's tokens."""
    bound, processes, inputs = call.bound, call.processes, {}
    for name, x in bound.inputs.items():
        time, axis = bound.axes[name]
        if time is not None:
            x = _exchange(call, bound.patterns[name], tuple(x.shape)).to_heads(x)
        elif axis is not None:
            part = share(x.shape[axis], processes.devices, processes.rank)
            x = x.narrow(axis, part.start, part.stop - part.start)
        inputs[name] = x
    masks = {
        name: mask if name in WHOLE else gathered(processes.group, mask, call.tokens["s"])
        for name, mask in bound.masks.items()
    }
    out = processes.together(lambda: call.mechanism(**inputs, **masks, backend=call.backend))
    pattern = call.mechanism.program.output
    return _exchange(call, pattern, pattern.shape(call.sizes)).to_tokens(out)


def _exchange(call: DividedCall, pattern: Pattern, shape: Shape) -> Exchange:
    """The exchange of an array with tokens, of this process's or of the whole shape."""
    axes = HeadAxes.of_pattern(pattern, shape)
    assert axes.time is not None  # It has tokens.
    axis, count = pattern.axes[axes.time], 1 if axes.heads is None else shape[axes.heads]
    times = tuple(axis.multiple * n for n in call.tokens[axis.letter])
    return Exchange(call.processes, axes, times, count)
