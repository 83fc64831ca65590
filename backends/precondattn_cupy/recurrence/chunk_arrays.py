"""A recurrence's arrays in the layout of its kernels, its chunks, and launches.

Inputs and outputs are in the dtype of the call. All intermediate arrays are float32.
"""

from __future__ import annotations

from precondattn.arrays import Array, namespace
from precondattn.spec.recurrence import Stream
from precondattn_cupy.configurations import Configuration, configuration, declare, padded_width
from precondattn_cupy.launch import Argument, cpp_type, launch
from precondattn_cupy.layout import empty, in_one_piece

declare(
    "chunk_states",
    half={128: Configuration(64, 32), 512: Configuration(32, 16)},
    full={64: Configuration(64, 32), 128: Configuration(32, 32), 512: Configuration(32, 16)},
)
declare("chunk_blocks", half={512: Configuration(64, 32)}, full={512: Configuration(64, 32)})

FILES = {
    "sum_gates": "chunk_gates",
    "gate_gradient": "chunk_gates",
    "delta_prepare": "chunk_delta",
    "delta_gradient": "chunk_delta",
    "carry_states": "chunk_states",
    "carry_gradients": "chunk_states",
    "read_chunks": "chunk_reads",
    "read_back": "chunk_reads",
    "d_scores_of": "chunk_gradient",
    "d_queries": "chunk_gradient",
    "d_keys_of": "chunk_gradient",
    "d_erased_of": "chunk_gradient",
}


def tokens_first(x: Array) -> Array:
    """An array (b, heads, tokens, …) as (b, tokens, heads, …), contiguous."""
    order = (0, 2, 1, *range(3, x.ndim))
    return in_one_piece(namespace(x).permute_dims(x, order))


def heads_first(x: Array) -> Array:
    """An array (b, tokens, heads, …) as (b, heads, tokens, …), as a view."""
    return namespace(x).permute_dims(x, (0, 2, 1, *range(3, x.ndim)))


class ChunkCall:
    """The arrays and numbers of one call.

    `q` (b, t, heads, r, d), `k` and `a` (b, s, heads, d), `v` (b, s, heads, e), `g` and `beta`
    (b, s, m). `a` are the keys that the delta rule erases; None if these are `k`.
    """

    def __init__(self, x: Stream, state: Array, decays: bool, scale: float) -> None:
        self.b, self.m, self.d, self.e = state.shape
        self.t, self.r = x.q.shape[2:4]
        self.s = x.k.shape[2]
        self.q, self.k, self.v = (tokens_first(array) for array in (x.q, x.k, x.v))
        self.a = None if x.erase is None else tokens_first(x.erase)
        self.g = self._numbers(x.g[..., 0, 0]) if decays else None
        self.beta = None if x.beta is None else self._numbers(x.beta)
        self.initial = in_one_piece(state)
        self.scale = float(scale)
        self.q_heads, self.k_heads, self.v_heads = (a.shape[2] for a in (self.q, self.k, self.v))
        self.a_heads = 1 if self.a is None else self.a.shape[2]
        self.width, self.step = padded_width(self.d), -(-self.e // 16) * 16
        half, widest = self.k.dtype.itemsize == 2, max(self.width, padded_width(self.e))
        tile = configuration("chunk_states", self.width, half)
        self.chunk, self.values = tile.rows, min(tile.columns, padded_width(self.e))
        self.block = min(configuration("chunk_blocks", widest, half).columns, widest)
        self.count = -(-self.s // self.chunk)
        self.tokens = self.count * self.chunk

    def _numbers(self, x: Array) -> Array:
        xp = namespace(x)
        return tokens_first(xp.astype(x, xp.float32, copy=False))

    @property
    def heads(self) -> int:
        """Heads of all sequences that have a state."""
        return int(self.b * self.m)

    @property
    def erases(self) -> tuple[int, ...]:
        """The last template argument of the delta rule's kernels, if `k` is not what is erased."""
        return () if self.a is None else (1,)

    @property
    def value_blocks(self) -> int:
        return -(-int(self.step) // self.block)

    @property
    def key_blocks(self) -> int:
        return -(-int(self.d) // self.block)

    def scratch(self, *shape: int) -> Array:
        """An uninitialized array in float32."""
        return empty(self.k, shape, namespace(self.k).float32)

    def outputs(self, *shape: int) -> Array:
        """An uninitialized array in the call's dtype."""
        return empty(self.v, shape)

    def of_heads(self, x: Array, heads: int, *shape: int) -> Array:
        """An array for a gradient by heads with a state; float32 where heads are to be summed."""
        return empty(x, shape, x.dtype if heads == self.m else namespace(x).float32)

    def sums_of_rows(self) -> int:
        """Bytes of a chunk's numbers per token: sums of gates, and up to two more."""
        return 4 * 4 * self.chunk

    def tile(self, rows: int, columns: int) -> int:
        """Bytes of a tile, with the wider padding (`cuda/chunk_tiles.cuh`)"""
        return rows * (4 * columns + 32)

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int],
        arguments: tuple[Argument, ...],
        shared: int,
        *sizes: int,
        out: Array | None = None,
    ) -> None:
        """Launch a kernel, instantiated for the call's dtype, optionally for that of a result, and
        for some sizes; kernels of a few numbers per token have no template arguments."""
        types = [cpp_type(self.k)] + ([] if out is None else [cpp_type(out)])
        template = f"<{', '.join([*types, *(str(size) for size in sizes)])}>" if sizes else ""
        threads = 2 * self.chunk if sizes else self.chunk
        launch(FILES[kernel], kernel + template, grid, threads, arguments, shared)
