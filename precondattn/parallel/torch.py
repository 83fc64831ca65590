"""Attention to sequences that are divided among the processes of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from precondattn.algebra.expression import parse
from precondattn.parallel import heads_torch, tokens_torch
from precondattn.parallel.agreement_torch import agreed
from precondattn.parallel.arguments_torch import bind
from precondattn.parallel.call_torch import Call, Processes
from precondattn.parallel.heads import Axes
from precondattn.parallel.layouts import Order

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
        Of one dimension. The tokens of process i come after those of process i − 1, unless the
        layout says otherwise.
    layout : str
        How a call is divided (`precondattn.parallel`): by "heads"; or by tokens, in the order
        "contiguous", "zigzag" or "cyclic[block=B]" (`precondattn.parallel.layouts`). In the last
        two the tokens of a process are not consecutive.

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
    try:
        order = None if layout == "heads" else Order.read(layout)
    except ValueError as error:
        raise ValueError(f"{owner}: {error}") from None
    if any(leaf.mixes_sequences for leaf in mechanism.program.leaves):
        raise ValueError(
            f"{owner}: the output of a sequence depends on all others, which no layout divides"
        )
    return ContextParallel(mechanism, mesh, layout, order)


@dataclass(frozen=True)
class Plan:
    """How a call is divided, and what a process sends to others. `print` it."""

    mechanism: str
    layout: str
    devices: int
    tokens: int
    """Queries of this process"""
    during: str
    """What it has during the call"""
    bytes_sent: Mapping[str, int]
    """By this process to others forward, of each array"""

    def __str__(self) -> str:
        lines = [
            f"{self.mechanism}: {self.tokens} tokens on this process of {self.devices}",
            f"  layout {self.layout!r}: {self.during} during the call",
            *(f"  {name}: {sent:,} bytes sent" for name, sent in self.bytes_sent.items()),
            f"  in all: {sum(self.bytes_sent.values()):,} bytes sent forward",
        ]
        return "\n".join(lines)


class ContextParallel:
    """A mechanism for parts of sequences; `context_parallel` makes it."""

    def __init__(
        self, mechanism: Mechanism, mesh: DeviceMesh, layout: str, order: Order | None
    ) -> None:
        self.mechanism, self.mesh, self.layout, self.order = mechanism, mesh, layout, order
        self._way = heads_torch if order is None else tokens_torch
        owner = f"context_parallel({mechanism})"
        group, rank = mesh.get_group(), mesh.get_local_rank()
        self.processes = Processes(owner, group, rank, mesh.size(), _device_of(mesh))

    def __repr__(self) -> str:
        return f"context_parallel({str(self.mechanism)!r}, {self.mesh}, layout={self.layout!r})"

    def __call__(self, *arrays: Any, backend: Any = None, **named: Any) -> Any:
        """The output of this process's tokens."""
        call = self._agreed(arrays, named, backend)
        part = self._way.output(call, self.processes)
        if not call.bound.is_distributed:
            return part
        pattern = self.mechanism.program.output
        whole = pattern.shape(call.sizes)
        time = Axes.of(pattern, whole).time
        assert time is not None  # Every output has tokens.
        stride = torch.empty(whole, device="meta").stride()
        return DTensor.from_local(
            part, self.mesh, [Shard(time)], run_check=False, shape=whole, stride=stride
        )

    def explain(self, *arrays: Any, **named: Any) -> Plan:
        """How a call with these arguments is divided. All processes ask together."""
        call = self._agreed(arrays, named, None)
        return Plan(
            str(self.mechanism),
            self.layout,
            self.processes.devices,
            call.tokens["t"][self.processes.rank],
            self._way.during(call, self.processes),
            self._way.bytes_sent(call, self.processes),
        )

    def _agreed(self, arrays: Any, named: Mapping[str, Any], backend: Any) -> Call:
        """The arguments, after all processes have checked theirs together."""
        bound, error = None, None
        try:
            bound = bind(self.mechanism, self.mesh, arrays, named)
        except (TypeError, ValueError) as raised:
            error = raised
        said, own = "", (0, 0)
        if bound is not None:
            on = "" if backend is None else f" on {backend!r}"
            said = f"{self.mechanism} in layout {self.layout!r}{on}: {bound}"
            own = bound.tokens
        owner, group, _, _, device = self.processes
        everyone = agreed(owner, group, device, said, own, error)
        assert bound is not None  # `agreed` has raised the error.
        tokens = {letter: tuple(n[i] for n in everyone) for i, letter in enumerate("ts")}
        if min(map(min, tokens.values())) < 1:
            raise ValueError(
                f"{owner}: every process must have a token; found numbers of queries "
                f"{tokens['t']} and of keys {tokens['s']}"
            )
        shapes = {name: bound.whole_shape(name, tokens) for name in bound.inputs}
        sizes = self.mechanism.inputs.sizes(owner, shapes)
        call = Call(self.mechanism, bound, tokens, sizes, backend, self.order)
        refused = self._way.refusal(self.mechanism, call, self.processes)
        if refused is not None:
            raise ValueError(f"{owner}: layout {self.layout!r} {refused}")
        return call


def _device_of(mesh: DeviceMesh) -> torch.device:
    """Where tensors are that processes exchange."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
