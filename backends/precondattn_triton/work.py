"""The work of the hottest kernels: products, exponentials and bytes of all launches of a call.

Lengths are multiples of the tiles; calls are causal, in 16 bits, with as many key heads as query
heads. Each function mirrors the grid and the loops of its kernel. The tests compare the products
with those that the interpreter counts. T tokens, m heads of all sequences, widths d and e.
"""

from __future__ import annotations

from precondattn_kernel_tools.roof import FULL, HALF, KernelWork, Size, causal_pairs
from precondattn_triton.configurations import Configuration
from precondattn_triton.lucid.plan import update_steps

EXACT = 3
"""tf32 products per product with float32's accuracy."""


# ---------------------------------------------------------------------------------------- LUCID


def update(
    size: Size, tiles: Configuration, block: int, tile: int, *, key_sums: bool = False
) -> KernelWork:
    """P_J = Σ_I Φ_JI y_I over all I before J, and Φ_JJ, for super-blocks J of `block` tokens.

    With key sums, backward, also Σ_I (Φ_JI ∘ y_J dv_Iᵀ) k̂_I.
    """
    m, t, d, e = size
    rows, columns = tiles.rows, tiles.columns
    block = min(block, t)
    before = within = moved = requested = 0
    launches, has_sums = [], False
    for step in update_steps(t, block, backward=key_sums):
        own, pairs = min(block, t - step.start), len(step.rows) * len(step.columns)
        launches.append(len(step.rows) // rows * m)
        before += pairs
        # Tiles on the diagonal are not stored.
        tile_pairs = sum(
            rows * columns * -(-((a + rows - 1) // tile * tile) // columns)
            for a in range(0, own, rows)
        )
        within += tile_pairs
        # A group's later launches add to the sums of its first.
        is_added = has_sums and not step.is_first
        has_sums = len(step.columns) > 0 if step.is_first else has_sums
        numbers = d + e if key_sums else e
        sums = len(step.rows) * numbers * FULL * (1 + is_added)
        sums = sums if step.columns else 0
        y_rows = len(step.rows) * e * HALF if key_sums and step.columns else 0
        written = tile_pairs * HALF + sums
        moved += (len(step.rows) + len(step.columns)) * d * HALF
        moved += len(step.columns) * e * HALF + y_rows + written
        # A tile scales its rows of y for each super-block of columns: a store and two loads.
        blocks = -(-len(step.columns) // block)
        requested += pairs * (d + e) // rows * HALF + tile_pairs * d // rows * HALF
        requested += own * d * HALF + written + 3 * blocks * y_rows
    products = 2 * (d + e) * (1 + key_sums)
    return KernelWork(
        "update with key sums" if key_sums else "update",
        tuple(launches),
        half=m * (before * products + within * 2 * d),
        tf32=0,
        exponentials=m * (before + within),
        bytes=m * moved,
        requested=m * requested,
    )


def substitute(size: Size, tile: int, block: int, solver: int) -> KernelWork:
    """y_i = β_i N_i (R_i − P_i − Σ_j Φ_ij y_j) of all tiles; programs have `solver` channels."""
    m, t, _, e = size
    block = min(block, t)
    tiles = [min(block, t - start) // tile for start in range(0, t, block)]
    blocks, products = len(tiles), sum(n * (n - 1) // 2 for n in tiles)
    matrix = (products * tile + t) * tile * HALF
    sides = t * e * HALF + (t - block) * e * FULL
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


def key_gradient(size: Size, tiles: Configuration, block: int | None = None) -> KernelWork:
    """dk̂ = −s Σ Φ g k̂ over all pairs, those of tiles on the diagonal twice.

    With super-blocks of `block` tokens, the pairs with tokens of later ones are those of `update`.
    """
    m, t, d, e = size
    rows, columns = tiles.rows, tiles.columns
    pairs = sum(
        rows
        * columns
        * (
            -(-(a + rows) // columns)
            + min(t, t if block is None else (a // block + 1) * block) // columns
            - a // columns
        )
        for a in range(0, t, rows)
    )
    sums = 0 if block is None else (t - 1) // block * block * d * FULL
    own = t * (2 * d + 2 * e) * HALF + sums
    return KernelWork(
        "key_gradient",
        (t // rows * m,),
        half=m * pairs * 2 * (2 * d + e),
        tf32=0,
        exponentials=m * pairs,
        bytes=m * own,
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


# ----------------------------------------------------------------------------------------- PaTH


def _entering(size: Size, chunk: int, block: int) -> tuple[int, int]:
    """Pairs of a query and a key of an earlier block, and of an earlier chunk of its own block."""
    blocks, chunks = size.tokens // block, block // chunk
    return (
        block**2 * blocks * (blocks - 1) // 2,
        blocks * chunk**2 * chunks * (chunks - 1) // 2,
    )


def path_forward(size: Size, tiles: Configuration, chunk: int, block: int) -> KernelWork:
    """o and λ: own chunks, the chunks of the block before, and the blocks before."""
    m, t, d, e = size
    rows = tiles.rows
    own = t // rows * max(rows // chunk, 1) * rows * chunk
    chunks = sum(rows * chunk * (a % block // chunk) for a in range(0, t, rows))
    blocks = sum(rows * block * (a // block) for a in range(0, t, rows))
    matrices = sum(a // block for a in range(0, t, rows))
    queries = t * (d * HALF + e * (HALF + FULL))
    keys = t * (5 * d + e + chunk) * HALF + t // block * d * d * HALF
    tile = own * (4 * d + e + chunk) + chunks * (3 * d + e) + blocks * (d + e)
    return KernelWork(
        "_forward",
        (t // rows * m,),
        half=m
        * 2
        * (
            own * (3 * d + e + chunk)
            + chunks * (3 * d + e)
            + blocks * (d + e)
            + matrices * rows * d * d
        ),
        tf32=0,
        exponentials=m * (own + chunks + blocks),
        bytes=m * (queries + keys),
        requested=m * (queries + (tile // rows + matrices * d * d) * HALF),
    )


def path_carry(size: Size, tiles: Configuration, chunk: int, block: int) -> KernelWork:
    """X of the blocks, and of the chunks, for one group of queries each."""
    m, t, d, _ = size
    rows = tiles.rows
    last = {a: (a % block + rows - 1) // chunk for a in range(0, t, rows)}
    steps = sum(last.values()) + sum(last[a] + 1 for a in range(block, t, rows))
    matrices = sum(a // block for a in range(0, t, rows))
    by_block, by_chunk = _entering(size, chunk, block)
    stored = (by_block // block + by_chunk // chunk) * d * HALF
    queries = (2 * t - block) * d * HALF
    factors = 2 * 2 * t * d * HALF + t // block * d * d * HALF
    return KernelWork(
        "carry",
        ((t - block) // rows * m, t // rows * m),
        half=m * 2 * rows * (steps * chunk * 2 * d + matrices * d * d),
        tf32=0,
        exponentials=0,
        bytes=m * (queries + factors + stored),
        requested=m * (queries + stored + (steps * chunk * 2 * d + matrices * d * d) * HALF),
    )


def path_query_gradient(
    size: Size, tiles: Configuration, of_blocks: Configuration, chunk: int, block: int
) -> KernelWork:
    """Y of the blocks, and of the chunks, for one group of queries each."""
    m, t, d, e = size
    rows, block_rows = tiles.rows, of_blocks.rows
    steps = sum((a % block + rows - 1) // chunk for a in range(0, t, rows))
    matrices = sum(a // block for a in range(0, t, block_rows))
    by_block, by_chunk = _entering(size, chunk, block)
    stored = 2 * (by_block // block + by_chunk // chunk) * d * HALF
    queries = (2 * t - block) * (e * HALF + d * FULL) + t * d * FULL
    keys = 2 * t * (d + e) * HALF + 2 * t * d * HALF + t // block * d * d * HALF
    chunks, blocks = rows * steps * chunk, block_rows * matrices * block
    return KernelWork(
        "query_gradient",
        ((t - block) // block_rows * m, t // rows * m),
        half=m * 2 * (chunks * (4 * d + e) + blocks * (2 * d + e) + block_rows * matrices * d * d),
        tf32=0,
        exponentials=m * (chunks + blocks),
        bytes=m * (queries + keys + stored),
        requested=m
        * (
            queries
            + stored
            + (chunks // rows * (3 * d + e) + blocks // block_rows * (d + e)) * HALF
            + matrices * d * d * HALF
        ),
    )


def path_key_gradient(
    size: Size, tiles: Configuration, of_blocks: Configuration, chunk: int, block: int
) -> KernelWork:
    """dv, dK̂ and dK̃, for one group of queries each."""
    m, t, d, e = size
    by_block, by_chunk = _entering(size, chunk, block)
    stored = (by_block // block + by_chunk // chunk) * d * HALF
    keys = (2 * t - block) * ((d + e) * HALF + (d + 2 * e) * FULL)
    queries = (2 * t - block) * e * HALF
    return KernelWork(
        "key_value_gradient",
        ((t - block) // of_blocks.rows * m, t // tiles.rows * m),
        half=m * 2 * (by_block + by_chunk) * (2 * d + 2 * e),
        tf32=0,
        exponentials=m * (by_block + by_chunk),
        bytes=m * (stored + keys + queries),
        requested=m
        * (keys + (by_block // of_blocks.rows + by_chunk // tiles.rows) * (d + e) * HALF),
    )


def path_reflections(size: Size, part: int, chunk: int, block: int) -> KernelWork:
    """F of the blocks, and of the chunks, in parts of `part` channels, for one group each."""
    m, t, d, _ = size
    by_block, by_chunk = _entering(size, chunk, block)
    rows = by_block // block + by_chunk // chunk
    matrices = t // block - 1 + t // chunk
    return KernelWork(
        "reflections",
        ((t // block - 1) * (d // part) * m, t // chunk * (d // part) * m),
        half=m * 2 * rows * d * d,
        tf32=0,
        exponentials=0,
        bytes=m * (2 * rows * d * HALF + matrices * d * d * FULL),
        requested=m * (rows * d * (1 + d // part) * HALF + matrices * d * d * FULL),
    )


# ---------------------------------------------------------------------------------- gated delta


def prepare(
    size: Size, tiles: Configuration, *, is_by_channel: bool = False, is_backward: bool = False
) -> KernelWork:
    """M of every chunk, its halves in registers, then the corner; Y and W; Z and Mᵀ A backward.

    With a gate per key channel, the scores from which M and A are computed are read.
    """
    m, t, d, e = size
    chunk, half, chunks = tiles.rows, tiles.rows // 2, t // tiles.rows * m
    levels = half.bit_length() - 2
    inverse = (2 * 2 * levels + 2) * 2 * half**3
    products = chunks * 2 * chunk**2 * (d + e)
    moved = m * t * 2 * (d + e) * HALF
    exponentials = chunks * 2 * half * half
    if not is_by_channel:
        products += chunks * 3 * 2 * half * half * d
    if is_backward:
        products += chunks * 2 * chunk**2 * (d + 2 * e)
        moved += m * t * (d + 2 * e + (0 if is_by_channel else d)) * HALF
        if not is_by_channel:
            blocks = -(-e // min(tiles.columns, e))
            products += chunks * blocks * 2 * chunk**2 * d
            exponentials += chunks * blocks * chunk**2
    if is_by_channel:
        # Scores of one or two kinds; the decay factors, decayed keys and erased keys of a row.
        kinds = 2 if is_backward else 1
        moved += m * t * (kinds * chunk * FULL + d * (kinds * FULL + (kinds - 1) * HALF))
    return KernelWork(
        "prepare",
        (chunks,),
        half=products,
        tf32=EXACT * chunks * inverse,
        exponentials=exponentials,
        bytes=moved,
        requested=moved,
    )


def carry_states(size: Size, tiles: Configuration, *, erases: bool = True) -> KernelWork:
    """The states, chunk after chunk, in blocks of value channels; the delta rule `erases`."""
    m, t, d, e = size
    blocks = e // min(tiles.columns, e)
    states = t // tiles.rows * d * e * HALF
    kinds = 2 if erases else 1
    values = t * e * kinds * HALF
    keys = t * d * kinds * HALF
    return KernelWork(
        "carry_states",
        (blocks * m,),
        half=m * t * kinds * 2 * d * e,
        tf32=0,
        exponentials=0,
        bytes=m * (states + values + keys),
        requested=m * (states + values + blocks * keys),
    )


def read(size: Size, tiles: Configuration, *, is_by_channel: bool = False) -> KernelWork:
    """The outputs of every chunk, in blocks of value channels.

    With a gate per key channel, the scores of the chunk and decayed queries are read.
    """
    m, t, d, e = size
    chunk, blocks = tiles.rows, e // min(tiles.columns, e)
    states = t // chunk * d * e * HALF
    values = t * e * 2 * HALF
    keys = t * (d + chunk if is_by_channel else 2 * d) * HALF
    scores = 0 if is_by_channel else blocks * chunk
    return KernelWork(
        "read",
        (t // chunk * blocks * m,),
        half=m * t * (2 * scores * d + 2 * d * e + 2 * chunk * e),
        tf32=0,
        exponentials=m * t * scores,
        bytes=m * (states + values + keys),
        requested=m * (states + values + blocks * keys),
    )


def carry_gradients(size: Size, tiles: Configuration, *, erases: bool = True) -> KernelWork:
    """The gradients of the states, from the last chunk to the first."""
    m, t, d, e = size
    blocks = e // min(tiles.columns, e)
    states = t // tiles.rows * d * e * HALF
    kinds = 3 if erases else 2
    values = t * e * 3 * HALF
    keys = t * d * kinds * HALF
    return KernelWork(
        "carry_gradients",
        (blocks * m,),
        half=m * t * kinds * 2 * d * e,
        tf32=0,
        exponentials=0,
        bytes=m * (states + values + keys),
        requested=m * (states + values + blocks * keys),
    )


def d_inputs(size: Size, tiles: Configuration) -> KernelWork:
    """The gradients of all inputs of a chunk, in blocks of key channels."""
    m, t, d, e = size
    chunk, blocks = tiles.rows, d // min(tiles.columns, d)
    states = 2 * t // chunk * d * e * HALF
    scores = t * chunk * HALF
    inputs = t * (2 * d + 2 * e + 2 * e) * HALF
    outputs = t * (2 * d + e) * HALF
    again = t * (blocks * 3 * e + 5 * d) * HALF + t // chunk * d * e * HALF
    return KernelWork(
        "d_inputs",
        (t // chunk * m,),
        half=m * t * 2 * (3 * d * e + chunk * (5 * d + 2 * e)),
        tf32=0,
        exponentials=m * t * 2 * chunk,
        bytes=m * (states + inputs + outputs + 2 * scores),
        requested=m * (states + inputs + outputs + 2 * scores + again),
    )


# ------------------------------------------------------------------------ a gate per key channel


def levels_of(chunk: int) -> int:
    """The halvings of a chunk (`recurrence/channel_decay.py`)."""
    return chunk.bit_length() - 1


def channel_scores(size: Size, tiles: Configuration, erases: bool = False) -> KernelWork:
    """All that a chunk needs from its gates: pairs, decayed rows, and the factors.

    With the delta rule, pairs with the keys that are erased too. A gate is two numbers of 16 bits.
    """
    m, t, d, _ = size
    chunk = tiles.rows
    levels, kinds = levels_of(chunk), 2 if erases else 1
    rows, gates, pairs = 2 * t * d * HALF, t * d * FULL, t * chunk
    written = rows + 2 * t * d * HALF + pairs * HALF + (pairs * FULL if erases else 0)
    return KernelWork(
        "channel_scores",
        (t // chunk * m,),
        half=m * t * 2 * chunk * d * (2 * (levels + 2) + kinds * levels),
        tf32=0,
        exponentials=m * (t * d * (levels + 2) + t // chunk * d),
        bytes=m * (rows + gates + written),
        requested=m * ((levels + 1) * (rows + gates) + written),
    )


def channel_gradient(size: Size, tiles: Configuration, erases: bool = False) -> KernelWork:
    """The gradients of one row per token, of the keys and of the gates, by blocks of channels."""
    m, t, d, _ = size
    chunk, blocks = tiles.rows, d // min(tiles.columns, d)
    levels, kinds = levels_of(chunk), 2 if erases else 1
    rows, pairs = t * d * (2 * HALF + FULL), kinds * t * chunk * HALF
    written = t * d * (2 * HALF + FULL)
    return KernelWork(
        "channel_gradient",
        (t // chunk * blocks * m,),
        half=m * t * 2 * chunk * d * levels * (4 + kinds),
        tf32=0,
        exponentials=m * t * d * levels,
        bytes=m * (rows + pairs + written),
        requested=m * (rows + blocks * pairs + written),
    )


def read_back(size: Size, tiles: Configuration) -> KernelWork:
    """The part of the gradients of what tokens write from the outputs of their own chunk."""
    m, t, _, e = size
    chunk, blocks = tiles.rows, e // min(tiles.columns, e)
    values, pairs = 2 * t * e * HALF, t * chunk * HALF
    return KernelWork(
        "read_back",
        (t // chunk * blocks * m,),
        half=m * t * 2 * chunk * e,
        tf32=0,
        exponentials=0,
        bytes=m * (values + pairs),
        requested=m * (values + blocks * pairs),
    )


def d_scores_of(size: Size, tiles: Configuration) -> KernelWork:
    """The gradients of the scores of every chunk."""
    m, t, _, e = size
    moved = m * t * (2 * e + tiles.rows) * HALF
    return KernelWork(
        "d_scores_of",
        (t // tiles.rows * m,),
        half=m * t * 2 * tiles.rows * e,
        tf32=0,
        exponentials=0,
        bytes=moved,
        requested=moved,
    )


def d_written(size: Size, tiles: Configuration) -> KernelWork:
    """The gradients of values and of the pairs of the delta rule."""
    m, t, _, e = size
    moved = m * t * (4 * e * HALF + tiles.rows * (HALF + FULL))
    return KernelWork(
        "d_written",
        (t // tiles.rows * m,),
        half=m * t * 2 * tiles.rows * e,
        tf32=0,
        exponentials=0,
        bytes=moved,
        requested=moved,
    )


def d_queries(size: Size, tiles: Configuration) -> KernelWork:
    """The gradients of queries, in blocks of key channels; Q ∘ dQ is in full precision."""
    m, t, d, e = size
    chunk, blocks = tiles.rows, d // min(tiles.columns, d)
    states, rows = t // chunk * d * e * HALF, t * d * (4 * HALF + FULL)
    return KernelWork(
        "d_queries",
        (t // chunk * blocks * m,),
        half=m * t * 2 * d * e,
        tf32=0,
        exponentials=0,
        bytes=m * (states + rows + t * e * HALF),
        requested=m * (states + rows + blocks * t * e * HALF),
    )


def d_keys_of(size: Size, tiles: Configuration, erases: bool = False) -> KernelWork:
    """The gradients of keys, in blocks of key channels; K ∘ dK is in full precision.

    With the delta rule, those of the erased keys, which are the same, are part of them.
    """
    m, t, d, e = size
    chunk, blocks, kinds = tiles.rows, d // min(tiles.columns, d), 2 if erases else 1
    states = 2 * t // chunk * d * e * HALF
    rows = t * d * (4 * HALF + FULL + (kinds - 1) * (HALF + FULL))
    values = kinds * t * e * HALF
    return KernelWork(
        "d_keys_of",
        (t // chunk * blocks * m,),
        half=m * t * kinds * 2 * d * e,
        tf32=0,
        exponentials=0,
        bytes=m * (states + rows + values),
        requested=m * (states + rows + blocks * values),
    )
