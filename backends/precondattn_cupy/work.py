"""The work of the hottest kernels: products, exponentials and bytes of all launches of a call.

Lengths are multiples of the tiles; calls are causal, in 16 bits, with as many key heads as query
heads. Each function mirrors the grid and the loops of its kernel, in its configuration: products
that a kernel computes twice are counted twice. T tokens, m heads of all sequences, widths d and e.
"""

from __future__ import annotations

from precondattn_cupy.configurations import Configuration, configuration
from precondattn_cupy.lucid.solve import WIDEST_CHUNK
from precondattn_cupy.recurrence import chunk_arrays  # noqa: F401  Declares its configurations.
from precondattn_cupy.softmax.attention import PART
from precondattn_kernel_tools import roof
from precondattn_kernel_tools.roof import FULL, HALF, KernelWork, causal_pairs


class TiledSize(roof.Size):
    """The sizes of a call, and the tiles for them."""

    def tiles(self, kernel: str) -> Configuration:
        return configuration(kernel, max(self.d, self.e), True)


# ---------------------------------------------------------------------------------------- LUCID


def lucid_systems(size: TiledSize) -> KernelWork:
    """Tiles of L on and below the diagonals of super-blocks; programs above them return at once.

    The inverses of the diagonal tiles are products of float32 and not counted.
    """
    m, t, d, _ = size
    rows, block = size.tiles("lucid_inverse")
    count = block // rows
    pairs = t // block * count * (count + 1) // 2
    return KernelWork(
        "lucid_systems",
        (t // rows * count * m,),
        half=m * pairs * 2 * rows * rows * d,
        tf32=0,
        exponentials=m * pairs * rows * rows,
        bytes=m * (t * d + pairs * rows * rows) * HALF,
        requested=m * pairs * (2 * rows * d + rows * rows) * HALF,
    )


def lucid_join(size: TiledSize) -> KernelWork:
    """−B⁻¹ C A⁻¹, from blocks of one tile to half a super-block."""
    m, t, _, _ = size
    rows, block = size.tiles("lucid_inverse")
    launches, products, moved, least = [], 0, 0, 0
    half = rows
    while half < block:
        count, joined = half // rows, t // (2 * half)
        launches.append(joined * count * m)
        products += joined * count * count * (count + 1)
        moved += joined * count * (count * (count + 1) // 2 * 3 + count) * rows * rows * HALF
        least += joined * 3 * half * half * HALF
        half *= 2
    return KernelWork(
        "lucid_join",
        tuple(launches),
        half=m * products * 2 * rows**3,
        tf32=0,
        exponentials=0,
        bytes=m * least,
        requested=m * moved,
    )


def lucid_apply(size: TiledSize) -> KernelWork:
    """ρ_J = N_J R_J of every super-block, with β; all of R_J is also read for its magnitudes."""
    m, t, _, e = size
    rows, block = size.tiles("lucid_inverse")
    count, blocks = block // rows, t // block
    products = count * (count + 1) // 2
    written = block * e * 3 * HALF
    read = products * rows * (rows * HALF + e * FULL) + count * block * e * FULL
    return KernelWork(
        "lucid_apply",
        (count * m * -(-e // WIDEST_CHUNK),) * blocks,
        half=m * blocks * products * 2 * rows * rows * e,
        tf32=0,
        exponentials=0,
        bytes=m * blocks * (block * (block // 2 * HALF + e * FULL) + written),
        requested=m * blocks * (read + written),
    )


def lucid_update(size: TiledSize) -> KernelWork:
    """R_I −= Φ_IJ y_J for every super-block J, and all later rows I."""
    m, t, d, e = size
    block, rows = size.tiles("lucid_inverse").columns, size.tiles("lucid_update").rows
    later = [t - start - block for start in range(0, t - block, block)]
    pairs, chunks = sum(later) * block, -(-e // WIDEST_CHUNK)
    sides, keys = sum(later) * e * 2 * FULL, sum(later) * d * HALF
    return KernelWork(
        "lucid_update",
        tuple(left // rows * m * chunks for left in later),
        half=m * pairs * 2 * (d * chunks + e),
        tf32=0,
        exponentials=m * pairs * chunks,
        bytes=m * (sides + keys + len(later) * block * (d + e) * HALF),
        requested=m * (sides + keys * chunks + pairs // rows * (d * chunks + e) * HALF),
    )


def lucid_key_gradient(size: TiledSize) -> KernelWork:
    """dk̂ = −s Σ Φ g k̂ over all pairs, those of tiles on the diagonal twice."""
    m, t, d, e = size
    rows, columns = size.tiles("lucid_gradient")
    pairs = sum(
        rows * columns * (-(-(a + rows) // columns) + t // columns - a // columns)
        for a in range(0, t, rows)
    )
    own = t * (2 * d + 2 * e) * HALF
    return KernelWork(
        "lucid_key_gradient",
        (t // rows * m,),
        half=m * pairs * 2 * (2 * d + e),
        tf32=0,
        exponentials=m * pairs,
        bytes=m * (own + t * d * HALF),
        requested=m * (own + pairs // rows * (d + e) * HALF),
    )


# ------------------------------------------------------------- softmax, and LASER of close heads


def softmax_forward(size: TiledSize) -> KernelWork:
    """o and λ."""
    m, t, d, e = size
    tiles = size.tiles("softmax_forward")
    pairs, parts = m * causal_pairs(t, *tiles), -(-e // PART)
    own = t * d * HALF + t * e * (HALF + FULL)
    return KernelWork(
        "softmax_forward",
        (t // tiles.rows * parts * m,),
        half=pairs * 2 * (d * parts + e),
        tf32=0,
        exponentials=pairs * parts,
        bytes=m * (own + t * (d + e) * HALF),
        requested=m * own + pairs // tiles.rows * (d * parts + e) * HALF,
    )


def softmax_query_gradient(size: TiledSize) -> KernelWork:
    """dq. Widths of at most 128."""
    m, t, d, e = size
    tiles = size.tiles("softmax_query_gradient")
    pairs = m * causal_pairs(t, *tiles)
    own = m * t * (2 * d + e) * HALF
    return KernelWork(
        "softmax_query_gradient",
        (t // tiles.rows * m,),
        half=pairs * 2 * (2 * d + e),
        tf32=0,
        exponentials=pairs,
        bytes=own + m * t * (d + e) * HALF,
        requested=own + pairs // tiles.rows * (d + e) * HALF,
    )


def softmax_key_gradient(size: TiledSize) -> KernelWork:
    """dk and dv. Widths of at most 128."""
    m, t, d, e = size
    rows, columns = size.tiles("softmax_key_gradient")
    pairs = m * sum(rows * columns * (t // columns - a // columns) for a in range(0, t, rows))
    own = m * t * 2 * (d + e) * HALF
    return KernelWork(
        "softmax_key_gradient",
        (t // rows * m,),
        half=pairs * 2 * (2 * d + 2 * e),
        tf32=0,
        exponentials=pairs,
        bytes=own + m * t * (d + e) * HALF,
        requested=own + pairs // rows * (d + e) * HALF,
    )


# ---------------------------------------------------------------------------------- gated delta


def delta_prepare(size: TiledSize) -> KernelWork:
    """Y and W of every chunk; its inverse is products of float32 and not counted."""
    m, t, d, e = size
    chunk = size.tiles("chunk_states").rows
    written = (chunk + d + e) * FULL
    return KernelWork(
        "delta_prepare",
        (t // chunk * m,),
        half=0,
        tf32=m * t * 2 * chunk * (2 * d + e),
        exponentials=m * t * chunk,
        bytes=m * t * ((d + e) * HALF + written),
        requested=m * t * ((2 * d + e) * HALF + written),
    )


def carry_states(size: TiledSize) -> KernelWork:
    """The states, chunk after chunk, in blocks of value channels."""
    m, t, d, e = size
    chunk, columns = size.tiles("chunk_states")
    blocks = -(-e // columns)
    states, values, keys = t // chunk * d * e * FULL, t * e * 2 * FULL, t * d * (HALF + FULL)
    return KernelWork(
        "carry_states",
        (blocks * m,),
        half=0,
        tf32=m * t * 2 * 2 * d * e,
        exponentials=0,
        bytes=m * (states + values + keys),
        requested=m * (states + values + blocks * keys),
    )


def read_chunks(size: TiledSize) -> KernelWork:
    """The outputs of every chunk; its scores are computed for each block of value channels."""
    m, t, d, e = size
    chunk, columns = size.tiles("chunk_states").rows, size.tiles("chunk_blocks").columns
    blocks = -(-e // columns)
    states, values, keys = t // chunk * d * e * FULL, t * e * (FULL + HALF), t * 2 * d * HALF
    return KernelWork(
        "read_chunks",
        (t // chunk * blocks * m,),
        half=0,
        tf32=m * t * 2 * (blocks * chunk * d + d * e + chunk * e),
        exponentials=m * t * blocks * chunk,
        bytes=m * (states + values + keys),
        requested=m * (states + values + blocks * keys),
    )


def carry_gradients(size: TiledSize) -> KernelWork:
    """The gradients of the states, from the last chunk to the first."""
    m, t, d, e = size
    chunk, columns = size.tiles("chunk_states")
    blocks = -(-e // columns)
    states, values = t // chunk * d * e * FULL, t * e * (2 * FULL + HALF)
    keys = t * d * (2 * HALF + FULL)
    return KernelWork(
        "carry_gradients",
        (blocks * m,),
        half=0,
        tf32=m * t * 3 * 2 * d * e,
        exponentials=0,
        bytes=m * (states + values + keys),
        requested=m * (states + values + blocks * keys),
    )
