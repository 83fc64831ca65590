"""Attention to sequences that are divided among the processes of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from precondattn.algebra.expression import parse
from precondattn.parallel.agreement_torch import agreed
from precondattn.parallel.arguments_torch import WHOLE, Bound, bind
from precondattn.parallel.exchange_torch import Exchange, gathered
from precondattn.parallel.heads import (
    LAYOUTS,
    Axes,
    Shape,
    elements_sent,
    heads_of_output,
    refusal,
    share,
)

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Mechanism


def context_parallel(
    mechanism: Mechanism | str, mesh: DeviceMesh, *, layout: str = "heads"
) -> ContextParallel:
    """The mechanism, called by every process of a mesh with its part of the tokens.

    Parameters
    ----------
    mechanism : Mechanism or str
        What to call, or its expression.
    mesh : DeviceMesh
        Of one dimension. The tokens of process i come after those of process i − 1.
    layout : {"heads"}
        How a call is divided (`precondattn.parallel`).

    Returns
    -------
    ContextParallel
        Called as the mechanism. Inputs with tokens are this process's part of them, as tensors, or
        as DTensors with the placement `Shard` of their tokens. Other inputs, such as weights, are
        whole on every process; so are `lengths` and `cu_seqlens`. The result is the output of this
        process's tokens, as a tensor or a DTensor.

    Raises
    ------
    TypeError, ValueError
        if the mesh is none, or has several dimensions, or the layout is unknown. In a call, on all
        processes alike: if arguments disagree, on one process or between them, a process has no
        token, or the layout can not divide the heads.

    Notes
    -----
    Gradients of tokens are those of the sum of all processes' losses. Those of weights are each
    process's term of it, which data parallelism adds up. A second derivative is an error.

    Examples
    --------
    In each of four processes that `torchrun` has started, with q, k and v (b, T / 4, heads, width):

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))  # doctest: +SKIP
    >>> attn = context_parallel("lucid", mesh["cp"])  # doctest: +SKIP
    >>> out = attn(q, k, v)  # doctest: +SKIP
    """
    if isinstance(mechanism, str):
        mechanism = parse(mechanism)
    owner = f"context_parallel({mechanism})"
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{owner}: mesh must be a DeviceMesh, such as mesh['cp']; found {type(mesh).__name__}"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"{owner}: mesh must have one dimension, such as mesh['cp']; found {mesh.ndim}"
        )
    if layout not in LAYOUTS:
        raise ValueError(
            f"{owner}: layout must be one of {', '.join(map(repr, LAYOUTS))}; found {layout!r}"
        )
    if any(leaf.mixes_sequences for leaf in mechanism.program.leaves):
        raise ValueError(
            f"{owner}: the output of a sequence depends on all others, which no layout divides"
        )
    return ContextParallel(mechanism, mesh, layout)


class Call(NamedTuple):
    """A call that all processes have agreed on."""

    bound: Bound
    tokens: dict[str, tuple[int, ...]]
    """The numbers of queries `t` and keys `s` of every process"""
    sizes: dict[str, int]
    """By letter, for all tokens"""


@dataclass(frozen=True)
class Plan:
    """How a call is divided, and what a process sends to others. `print` it."""

    mechanism: str
    layout: str
    devices: int
    tokens: int
    """Of this process, between calls"""
    heads: int
    """Of the output, on this process during a call"""
    bytes_sent: Mapping[str, int]
    """By this process forward, of each input with tokens and of the output, `out`"""

    def __str__(self) -> str:
        lines = [
            f"{self.mechanism}: {self.tokens} tokens on this process of {self.devices}",
            f"  layout {self.layout!r}: all tokens of {self.heads} heads during the call",
            *(f"  {name}: {sent:,} bytes sent" for name, sent in self.bytes_sent.items()),
            f"  in all: {sum(self.bytes_sent.values()):,} bytes sent, and as many in the gradient",
        ]
        return "\n".join(lines)


class ContextParallel:
    """A mechanism for parts of sequences; `context_parallel` makes it."""

    def __init__(self, mechanism: Mechanism, mesh: DeviceMesh, layout: str) -> None:
        self.mechanism, self.mesh, self.layout = mechanism, mesh, layout
        self.owner = f"context_parallel({mechanism})"
        self.group, self.rank, self.devices = mesh.get_group(), mesh.get_local_rank(), mesh.size()

    def __repr__(self) -> str:
        return f"context_parallel({str(self.mechanism)!r}, {self.mesh}, layout={self.layout!r})"

    def __call__(self, *arrays: Any, backend: Any = None, **named: Any) -> Any:
        """The output of this process's tokens."""
        call = self._agreed(arrays, named)
        bound, names = call.bound, call.bound.with_tokens
        moved = self._exchange(call).to_heads([bound.inputs[name] for name in names])
        inputs = {**self._weights(bound), **dict(zip(names, moved, strict=True))}
        masks = {
            name: mask if name in WHOLE else gathered(self.group, mask, call.tokens["s"])
            for name, mask in bound.masks.items()
        }
        out, error = None, None
        try:
            out = self.mechanism(**inputs, **masks, backend=backend)
        except Exception as raised:
            error = raised
        agreed(self.owner, self.group, _device_of(self.mesh), error=error)
        return self._of_tokens(out, call)

    def explain(self, *arrays: Any, **named: Any) -> Plan:
        """How a call with these arguments is divided. All processes ask together."""
        call = self._agreed(arrays, named)
        bound = call.bound
        shapes = {name: tuple(bound.inputs[name].shape) for name in bound.with_tokens}
        own = {letter: counts[self.rank] for letter, counts in call.tokens.items()}
        of_out = self.mechanism.program.output
        out, whole = of_out.shape(call.sizes | own), of_out.shape(call.sizes)
        elements = elements_sent(self.mechanism.inputs, shapes, out, whole, self.devices)
        widths = {name: x.dtype.itemsize for name, x in bound.inputs.items()}
        widths["out"] = widths.get("v", next(iter(widths.values())))
        return Plan(
            str(self.mechanism),
            self.layout,
            self.devices,
            own["t"],
            call.sizes[heads_of_output(self.mechanism)] // self.devices,
            {name: count * widths[name] for name, count in elements.items()},
        )

    def _agreed(self, arrays: Any, named: Mapping[str, Any]) -> Call:
        """The arguments, after all processes have checked theirs together."""
        bound, error = None, None
        try:
            bound = bind(self.mechanism, self.mesh, arrays, named)
        except (TypeError, ValueError) as raised:
            error = raised
        said, own = ("", (0, 0)) if bound is None else (str(bound), bound.tokens)
        device = _device_of(self.mesh)
        everyone = agreed(self.owner, self.group, device, said, own, error)
        assert bound is not None  # `agreed` has raised the error.
        tokens = {letter: tuple(n[i] for n in everyone) for i, letter in enumerate("ts")}
        if min(map(min, tokens.values())) < 1:
            raise ValueError(
                f"{self.owner}: every process must have a token; found numbers of queries "
                f"{tokens['t']} and of keys {tokens['s']}"
            )
        shapes = {name: bound.whole_shape(name, tokens) for name in bound.inputs}
        sizes = self.mechanism.inputs.sizes(self.owner, shapes)
        refused = refusal(self.mechanism, sizes, self.devices)
        if refused is not None:
            raise ValueError(f"{self.owner}: layout {self.layout!r}: {refused}")
        return Call(bound, tokens, sizes)

    def _exchange(self, call: Call) -> Exchange:
        """Of all inputs with tokens."""
        bound, names = call.bound, call.bound.with_tokens
        axes = tuple(bound.axes[name] for name in names)
        times = tuple(bound.times(name, call.tokens) for name in names)
        heads = tuple(
            1 if axis.heads is None else bound.inputs[name].shape[axis.heads]
            for name, axis in zip(names, axes, strict=True)
        )
        return Exchange(self.group, self.rank, axes, times, heads)

    def _weights(self, bound: Bound) -> dict[str, Tensor]:
        """Inputs without tokens, those of this process's heads."""
        result = {}
        for name, x in bound.inputs.items():
            axes = bound.axes[name]
            if axes.time is None:
                result[name] = x
                if axes.heads is not None:
                    part = share(x.shape[axes.heads], self.devices, self.rank)
                    result[name] = x.narrow(axes.heads, part.start, part.stop - part.start)
        return result

    def _of_tokens(self, out: Tensor, call: Call) -> Any:
        """The output of this process's tokens, from that of its heads."""
        pattern = self.mechanism.program.output
        whole: Shape = pattern.shape(call.sizes)
        axes = Axes.of(pattern, whole)
        assert axes.time is not None
        times = call.tokens[pattern.letters[axes.time]]
        heads = 1 if axes.heads is None else whole[axes.heads]
        exchange = Exchange(self.group, self.rank, (axes,), (times,), (heads,))
        (part,) = exchange.to_tokens([out])
        if not call.bound.is_distributed:
            return part
        stride = torch.empty(whole, device="meta").stride()
        return DTensor.from_local(
            part, self.mesh, [Shard(axes.time)], run_check=False, shape=whole, stride=stride
        )


def _device_of(mesh: DeviceMesh) -> torch.device:
    """Where tensors are that processes exchange."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
