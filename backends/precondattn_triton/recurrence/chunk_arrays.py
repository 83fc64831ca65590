"""A recurrence's arrays by the names that its kernels have for them, and how tokens are cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from precondattn.spec.recurrence import Stream
from precondattn_triton.configurations import Configuration, configuration
from precondattn_triton.precision import padded_width

WIDEST_BLOCK = 64
"""Value channels come in blocks of so many, or fewer."""


def strides(name: str, array: Tensor, axes: str) -> dict[str, int]:
    """Of the axes, as `name`_`axis`; an axis of one element has the stride 0."""
    return {
        f"{name}_{axis}": stride if size > 1 else 0
        for axis, size, stride in zip(axes, array.shape, array.stride(), strict=True)
    }


def strides_if(name: str, array: Tensor | None, axes: str) -> dict[str, int]:
    """The same, 0 where there is no such array."""
    return {f"{name}_{axis}": 0 for axis in axes} if array is None else strides(name, array, axes)


def decay_of(x: Stream) -> str:
    """What has a gate of its own, besides every token.

    Raises
    ------
    ValueError
        where it is every number of the state, or, by the delta rule, every row or column.
    """
    rows, columns = x.g.shape[3:]
    if min(rows, columns) > 1 or (x.beta is not None and max(rows, columns) > 1):
        raise ValueError(
            "the chunkwise form has one decay for each head, or, where values are added, one for "
            f"each key or each value channel; found {rows} x {columns} decays"
        )
    return "keys" if rows > 1 else "values" if columns > 1 else "head"


def padded_values(e: int) -> int:
    """The width of values in whole blocks."""
    block = min(padded_width(e), WIDEST_BLOCK)
    return -(-e // block) * block


def widest_of(d: int, e: int) -> int:
    """What configurations of these widths of keys and values go by."""
    return max(padded_width(d), min(padded_width(e), 2 * WIDEST_BLOCK))


def tokens_of_chunk(kernel: str, d: int, e: int, half: bool, like: Tensor) -> int:
    """How many tokens a chunk has in a kernel, and so in all others of a call."""
    return configuration(kernel, widest_of(d, e), half, like).rows


class Call:
    """The arrays of one call, and its launches.

    A kernel is launched with what it has arguments for: arrays and numbers are in `known`, by the
    names that stand in the kernels. A chunk has as many tokens as is configured, or `chunk`.
    """

    def __init__(
        self,
        x: Stream,
        state: Tensor,
        decays: bool,
        scale: float,
        precision: str,
        half: bool,
        chunk: int | None = None,
    ) -> None:
        b, m, d, e = state.shape
        s, (t, r) = x.k.shape[2], x.q.shape[2:4]
        self.b, self.m, self.s, self.t, self.r, self.d, self.e = b, m, s, t, r, d, e
        self.half, self.like = half, x.k
        self.width, self.step = padded_width(d), padded_values(e)
        self.decay = decay_of(x) if decays else "none"
        self.is_by_channel = self.decay in ("keys", "values")
        self.gate_step = self.step if self.decay == "values" else self.width
        """The width of gates in scratch, where channels have their own."""
        self.widest = widest_of(d, e)
        self.chunk = self.cut("chunk_states").rows if chunk is None else chunk
        self.count = -(-s // self.chunk)
        self.tokens = self.count * self.chunk
        self.known: dict[str, Any] = {
            "q": x.q,
            "k": x.k,
            "v": x.v,
            **strides("q", x.q, "bmtrd"),
            **strides("k", x.k, "bmsd"),
            **strides("v", x.v, "bmse"),
            "q_group": m // x.q.shape[1],
            "k_group": m // x.k.shape[1],
            "v_group": m // x.v.shape[1],
            "heads": m,
            "queries": r,
            "s": s,
            "t": t,
            "tokens": self.tokens,
            "d": d,
            "e": e,
            "scale": scale,
            "initial": state.contiguous(),
            "CHUNK": self.chunk,
            "WIDTH": self.width,
            "STEP": self.step,
            "GATE_STEP": self.gate_step,
            "DECAY": self.decay,
            "PRECISION": precision,
        }

    def cut(self, kernel: str) -> Configuration:
        """By the configuration of that name."""
        return configuration(kernel, self.widest, self.half, self.like)

    def keys(self, kernel: str) -> int:
        """Key channels that a kernel has at once."""
        return min(self.cut(kernel).columns, self.width)

    def values(self, kernel: str) -> int:
        """Value channels that a kernel has at once."""
        return min(self.cut(kernel).columns, self.step, WIDEST_BLOCK)

    def both(self, kernel: str) -> int:
        """Channels of either that a kernel has at once."""
        return min(self.keys(kernel), self.values(kernel))

    def gate_block(self, kernel: str) -> int:
        """Channels with gates that a kernel has at once."""
        return self.values(kernel) if self.decay == "values" else self.keys(kernel)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.like.device)

    def launch(self, kernel: Any, name: str, grid: tuple[int, int], **own: Any) -> None:
        """By the configuration of that name."""
        cut, given = self.cut(name), self.known | own
        arguments = {argument: given[argument] for argument in kernel.arg_names}
        kernel[grid](**arguments, num_warps=cut.warps, num_stages=cut.stages)
