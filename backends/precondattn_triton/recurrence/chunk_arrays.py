"""The arrays of a recurrence, by the names of kernel arguments, and the sizes of its chunks."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from precondattn.kernel_backend.limits import padded_width
from precondattn.kernel_backend.precise import is_precise
from precondattn.limits import KEPT
from precondattn.spec.recurrence import Stream
from precondattn_triton.configurations import Configuration, configuration
from precondattn_triton.launching import Argument, Grid, Jitted, launch
from precondattn_triton.precision import exact
from precondattn_triton.recurrence.chunk_tiles import ChunkSizes, SharedHeads

WIDEST_BLOCK = 64
"""The largest block of value channels."""


def shared_heads(array: Tensor | None, states: int = 0) -> SharedHeads | None:
    """The argument of a kernel that reads an array (b, heads, t, …), which `states` heads with a
    state share; by default, each has its own."""
    if array is None:
        return None
    axes = zip(array.shape, array.stride(), strict=True)
    batch, head, token, *rest = [stride if size > 1 else 0 for size, stride in axes]
    row, channel = (0, 0, *rest)[-2:]
    group = states // array.shape[1] if states else 1
    return SharedHeads(array, batch, head, token, row, channel, group)


def decay_of(x: Stream) -> str:
    """Which part of the state has its own gate: "head", "keys" or "values" (channels).

    Raises
    ------
    ValueError
        if every element of the state has its own gate, or, with the delta rule, every column; or if
        a key is erased from the state before a decay of channels.
    """
    rows, columns = x.g.shape[3:]
    if min(rows, columns) > 1 or (x.beta is not None and columns > 1):
        raise ValueError(
            "the chunkwise form supports one decay per head or key channel, or, without the delta "
            f"rule, one per value channel; found {rows} x {columns} decays"
        )
    if rows > 1 and x.undecayed is not None:
        raise ValueError(
            "the chunkwise form erases from the state before its decay with one decay per head; "
            f"found {rows}"
        )
    return "keys" if rows > 1 else "values" if columns > 1 else "head"


def padded_values(e: int) -> int:
    """The width of v, padded to whole blocks."""
    block = min(padded_width(e), WIDEST_BLOCK)
    return -(-e // block) * block


def widest_of(d: int, e: int) -> int:
    """The width by which configurations are looked up, from the widths of k and v."""
    return max(padded_width(d), min(padded_width(e), 2 * WIDEST_BLOCK))


def tokens_of_chunk(kernel: str, d: int, e: int, half: bool, like: Tensor) -> int:
    """Tokens of a chunk in this kernel; all kernels of a call use the same number."""
    return configuration(kernel, widest_of(d, e), half, like).rows


def factors_of(x: Stream, precision: str) -> torch.dtype:
    """The dtype in which factors of products are stored.

    bfloat16, if all inputs are in it. float16 does not have the range of a state, and precise
    kernels round nothing.
    """
    is_rounded = {x.q.dtype, x.k.dtype, x.v.dtype} == {torch.bfloat16}
    return (
        torch.bfloat16
        if is_rounded and precision != exact() and not is_precise()
        else torch.float32
    )


Arguments = dict[str, Argument]


class ChunkCall:
    """The arrays of one call, and its launches.

    `arguments` has arrays and numbers by the names of kernel arguments; a launch passes those that
    the kernel declares. A chunk has `chunk` tokens, or, by default, the configured number.
    """

    def __init__(
        self,
        x: Stream,
        state: Tensor | None,
        decays: bool,
        scale: float,
        precision: str,
        half: bool,
        chunk: int | None = None,
    ) -> None:
        (b, m), d, e = x.g.shape[:2], x.k.shape[3], x.v.shape[3]
        s, (t, r) = x.k.shape[2], x.q.shape[2:4]
        self.b, self.m, self.s, self.t, self.r, self.d, self.e = b, m, s, t, r, d, e
        self.half, self.like = half, x.k
        self._configurations: dict[str, Configuration] = {}
        self.factors = factors_of(x, precision)
        """The dtype of rows and states in the workspace that are factors of products only."""
        self.width, self.step = padded_width(d), padded_values(e)
        decay = decay_of(x)
        erase = x.erase if x.undecayed is None else x.undecayed
        self.decay = decay if decays else "none"
        self.is_by_channel = self.decay in ("keys", "values")
        self.gate_step = self.step if self.decay == "values" else self.width
        """The width of gates in the workspace, if channels have their own."""
        self.widest = widest_of(d, e)
        name = "channel_gates" if self.is_by_channel else "chunk_states"
        self.chunk = self.configuration(name).rows if chunk is None else chunk
        self.count = -(-s // self.chunk)
        self.tokens = self.count * self.chunk
        self.arguments: Arguments = {
            "q": shared_heads(x.q, m),
            "k": shared_heads(x.k, m),
            "v": shared_heads(x.v, m),
            "erase": shared_heads(erase, m),
            "erasing": None,
            "sizes": ChunkSizes(m, r, s, t, self.tokens, d, e, scale),
            "initial": None if state is None else state.contiguous(),
            "CHUNK": self.chunk,
            "WIDTH": self.width,
            "STEP": self.step,
            "GATE_STEP": self.gate_step,
            "DECAY": self.decay,
            "UNDECAYED": x.undecayed is not None and self.decay == "head",
            "PRECISION": precision,
        }

    @property
    def erasing(self) -> Tensor | None:
        """The decay of the state from before the chunk to when each token erases from it."""
        name = "erasing" if self.arguments["UNDECAYED"] else "reading"
        result: Tensor | None = self.arguments[name]
        return result

    def configuration(self, kernel: str) -> Configuration:
        """The configuration of that name."""
        if kernel not in self._configurations:
            found = configuration(kernel, self.widest, self.half, self.like)
            self._configurations[kernel] = found
        return self._configurations[kernel]

    def keys(self, kernel: str) -> int:
        """Key channels in a tile of a kernel."""
        return min(self.configuration(kernel).columns, self.width)

    def values(self, kernel: str) -> int:
        """Value channels in a tile of a kernel."""
        return min(self.configuration(kernel).columns, self.step, WIDEST_BLOCK)

    def both(self, kernel: str) -> int:
        """Channels in a tile of a kernel that iterates over both key and value channels."""
        return min(self.keys(kernel), self.values(kernel))

    def gate_block(self, kernel: str) -> int:
        """Gated channels in a tile of a kernel."""
        return self.values(kernel) if self.decay == "values" else self.keys(kernel)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.like.device)

    def factor_rows(self, width: int) -> Tensor:
        """Workspace (m, T, width) for factors of products."""
        return self.empty(self.b * self.m, self.tokens, width, dtype=self.factors)

    def launch(self, kernel: Jitted, name: str, grid: Grid, **extra: Argument) -> None:
        """Launch with the configuration of that name; `extra` are arguments of this launch."""
        tuned, arguments = self.configuration(name), self.arguments | extra
        names, constants = _parameters(tuple(kernel.arg_names))
        launch(
            kernel,
            grid,
            *[arguments[name] for name in names],
            **{name: arguments[name] for name in constants},
            num_warps=tuned.warps,
            num_stages=tuned.stages,
        )


@lru_cache(maxsize=KEPT)
def _parameters(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a kernel's arguments, and of its constants, which are in capitals."""
    return tuple([n for n in names if not n.isupper()]), tuple([n for n in names if n.isupper()])
