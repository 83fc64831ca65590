"""The work of the hottest kernels: products, exponentials and bytes of all launches of a call.

Lengths are multiples of the tiles; calls are causal, in 16 bits, with as many key heads as query
heads. Each function mirrors the grid and the loops of its kernel. The tests compare the products
with those that the interpreter counts. T tokens, m heads of all sequences, widths d and e.
"""

from __future__ import annotations

from precondattn_kernel_tools.roof import FULL, HALF, KernelWork, Size, causal_pairs
from precondattn_triton.configurations import Configuration

EXACT = 3
"""tf32 products per product with float32's accuracy."""


# ---------------------------------------------------------------------------------------- LUCID


def update(size: Size, tiles: Configuration, block: int) -> KernelWork:
    """P_J = Σ_I Φ_JI y_I over all I before J, and Φ_JJ, for super-blocks J of `block` tokens."""
    m, t, d, e = size
    rows, columns = tiles.rows, tiles.columns
    starts = range(0, t, min(block, t))
    block = min(block, t)
    before = sum(starts) * block
    within = len(starts) * causal_pairs(block, rows, columns)
    keys, y = (sum(starts) + t) * d * HALF, sum(starts) * e * HALF
    written = (len(starts) - 1) * block * e * FULL + within * HALF
    return KernelWork(
        "update",
        (block // rows * m,) * len(starts),
        half=m * (before * 2 * (d + e) + within * 2 * d),
        tf32=0,
        exponentials=m * (before + within),
        bytes=m * (keys + y + written),
        requested=m * ((before * (d + e) + within * d) // rows * HALF + t * d * HALF + written),
    )


def substitute(size: Size, tile: int, block: int, solver: int) -> KernelWork:
    """y_i = β_i N_i (R_i − P_i − Σ_j Φ_ij y_j) of all tiles; programs have `solver` channels."""
    m, t, _, e = size
    block = min(block, t)
    blocks, tiles = t // block, block // tile
    products = blocks * tiles * (tiles - 1) // 2
    matrix = (products * tile + t) * tile * HALF
    sides = t * e * HALF + (blocks - 1) * block * e * FULL
    written = t * e * 3 * HALF
    return KernelWork(
        "substitute",
        (e // solver * m,) * blocks,
        half=m * (products * tile + t) * tile * 2 * e,
        tf32=0,
        exponentials=0,
        bytes=m * (matrix + sides + written),
        requested=m
        * (
            matrix * (e // solver) + products * tile * e * HALF + sides + written + 2 * t * e * HALF
        ),
    )


def key_gradient(size: Size, tiles: Configuration) -> KernelWork:
    """dk̂ = −s Σ Φ g k̂ over all pairs, those of tiles on the diagonal twice."""
    m, t, d, e = size
    rows, columns = tiles.rows, tiles.columns
    pairs = sum(
        rows * columns * (-(-(a + rows) // columns) + t // columns - a // columns)
        for a in range(0, t, rows)
    )
    own = t * (2 * d + 2 * e) * HALF
    return KernelWork(
        "key_gradient",
        (t // rows * m,),
        half=m * pairs * 2 * (2 * d + e),
        tf32=0,
        exponentials=m * pairs,
        bytes=m * (own + t * d * HALF),
        requested=m * (own + pairs // rows * (d + e) * HALF),
    )


# ---------------------------------------------------------------------------------------- LASER

SUMS = 16
"""Columns of the product that sums rows (`softmax/row_sums.py`)."""


def close(size: Size, tiles: Configuration) -> KernelWork:
    """o and λ of close heads."""
    m, t, d, e = size
    pairs = causal_pairs(t, *tiles[:2])
    own = t * d * HALF + t * e * (HALF + FULL)
    return KernelWork(
        "_close",
        (t // tiles.rows * m,),
        half=m * pairs * 2 * (d + e + SUMS),
        tf32=0,
        exponentials=m * pairs,
        bytes=m * (own + t * (d + e) * HALF),
        requested=m * (own + pairs // tiles.rows * (d + e) * HALF),
    )


def laser_query_gradient(size: Size, tiles: Configuration) -> KernelWork:
    """dq of close heads."""
    m, t, d, e = size
    pairs = causal_pairs(t, *tiles[:2])
    own = t * (2 * d + e) * HALF
    return KernelWork(
        "_query_gradient",
        (t // tiles.rows * m,),
        half=m * pairs * 2 * (2 * d + e),
        tf32=0,
        exponentials=m * pairs,
        bytes=m * (own + t * (d + e) * HALF),
        requested=m * (own + pairs // tiles.rows * (d + e) * HALF),
    )


def laser_key_gradient(size: Size, tiles: Configuration) -> KernelWork:
    """dk and dv of close heads; a tile of keys meets all later queries."""
    m, t, d, e = size
    rows, columns = tiles.rows, tiles.columns
    pairs = sum(
        rows * columns * ((t - a // columns * columns) // columns) for a in range(0, t, rows)
    )
    own = t * 2 * (d + e) * HALF
    return KernelWork(
        "_key_gradient",
        (t // rows * m,),
        half=m * pairs * 2 * (2 * d + 2 * e),
        tf32=0,
        exponentials=m * pairs,
        bytes=m * (own + t * (d + e) * HALF),
        requested=m * (own + pairs // rows * (d + e) * HALF),
    )


# ---------------------------------------------------------------------------------- gated delta


def invert(size: Size, tiles: Configuration) -> KernelWork:
    """M of every chunk: its halves in registers, then the corner."""
    m, t, d, _ = size
    half, chunks = tiles.rows // 2, t // tiles.rows * m
    levels = half.bit_length() - 2
    inverse = (2 * 2 * levels + 2) * 2 * half**3
    return KernelWork(
        "invert",
        (chunks,),
        half=chunks * 3 * 2 * half * half * d,
        tf32=EXACT * chunks * inverse,
        exponentials=chunks * 2 * half * half,
        bytes=m * t * (d * HALF + tiles.rows * FULL),
        requested=m * t * (d * HALF + tiles.rows * FULL),
    )


def prepare(size: Size, tiles: Configuration) -> KernelWork:
    """Y and W of every chunk."""
    m, t, d, e = size
    moved = m * t * (tiles.rows * FULL + (d + e) * (HALF + FULL))
    return KernelWork(
        "prepare",
        (t // tiles.rows * m,),
        half=0,
        tf32=m * t * 2 * tiles.rows * (d + e),
        exponentials=0,
        bytes=moved,
        requested=moved,
    )


def carry_states(size: Size, tiles: Configuration) -> KernelWork:
    """The states, chunk after chunk, in blocks of value channels."""
    m, t, d, e = size
    blocks = e // min(tiles.columns, e)
    states = t // tiles.rows * d * e * FULL
    values = t * e * 2 * FULL
    keys = t * d * (HALF + FULL)
    return KernelWork(
        "carry_states",
        (blocks * m,),
        half=0,
        tf32=m * t * 2 * 2 * d * e,
        exponentials=0,
        bytes=m * (states + values + keys),
        requested=m * (states + values + blocks * keys),
    )


def read(size: Size, tiles: Configuration) -> KernelWork:
    """The outputs of every chunk, in blocks of value channels."""
    m, t, d, e = size
    chunk, blocks = tiles.rows, e // min(tiles.columns, e)
    states = t // chunk * d * e * FULL
    values = t * e * (FULL + HALF)
    keys = t * 2 * d * HALF
    return KernelWork(
        "read",
        (t // chunk * blocks * m,),
        half=m * t * blocks * 2 * chunk * d,
        tf32=m * t * (2 * d * e + 2 * chunk * e),
        exponentials=m * t * blocks * chunk,
        bytes=m * (states + values + keys),
        requested=m * (states + values + blocks * keys),
    )


def carry_gradients(size: Size, tiles: Configuration) -> KernelWork:
    """The gradients of the states, from the last chunk to the first."""
    m, t, d, e = size
    blocks = e // min(tiles.columns, e)
    states = t // tiles.rows * d * e * FULL
    values = t * e * (2 * FULL + HALF)
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


# ------------------------------------------------------------------------ a gate per key channel

SUB = 16
"""Tokens of a sub-chunk (`recurrence/channel_decay.py`)."""


def channel_scores(size: Size, tiles: Configuration) -> KernelWork:
    """The pairs of one row per token, by sub-chunks: of queries, or of the keys that are erased."""
    m, t, d, _ = size
    chunk = tiles.rows
    rows, scores = t * d * (HALF + FULL), t * chunk * FULL
    return KernelWork(
        "channel_scores",
        (t // SUB * m,),
        half=0,
        tf32=m * t * 2 * chunk * d,
        exponentials=m * t * d * (1 + chunk // SUB + SUB),
        bytes=m * (rows + t * d * HALF + scores),
        requested=m * (rows + chunk // SUB * rows + t * d * (HALF + FULL) + scores),
    )


def channel_gradient(size: Size, tiles: Configuration) -> KernelWork:
    """The gradients of one row per token, of the keys and of the gates, by sub-chunks."""
    m, t, d, _ = size
    chunk, subs = tiles.rows, tiles.rows // SUB
    moved = t * d * (2 * HALF + FULL) + t * chunk * FULL + t * d * 3 * FULL
    return KernelWork(
        "channel_gradient",
        (t // SUB * (d // min(tiles.columns, d)) * m,),
        half=0,
        tf32=m * t * 2 * chunk * d * (2 + subs),
        exponentials=m * t * d * (2 + 3 * subs + SUB),
        bytes=m * moved,
        requested=m * (moved + 2 * subs * t * d * (HALF + FULL) + subs * t * chunk * FULL),
    )
