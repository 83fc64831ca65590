"""Mesa's query by conjugate gradients, for the queries of a chunk of tokens.

    (H_t + diag λ) x = q,    H_t p = reading_t Sᵀ p + Σ_{j ≤ t} D_tj (p·k_j) v_j,    v = β k

with S the state before the chunk. H_t of no token is formed: a product with those of all tokens of
the chunk is two products among them and one with S. Preconditioned by the diagonal of H_t + diag λ,
and iterated as in `precondattn_portable.mesa_query`, until every query has a small residual:

    α = r·z / p·(M p),    x += α p,    r −= α M p,    z = r / diagonal,    p = z + (r·z)⁺ / (r·z) p.

Then the residual is computed anew, and solved for in turn where it is not small enough. Queries
that are solved early take more steps with the others, towards their exact solution.

Grid: one program per some rows of a chunk with queries, and per query of each token. 4 d² + 4 C d
FLOPs per token and iteration. A program writes the rows that it multiplies to the workspace, and
reads them, k and the state from the caches in blocks of channels: in registers, they would leave no
room for x, the residuals and the products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import (
    head_of,
    load_head,
    product,
    store_rows,
    store_tokens,
)
from precondattn_triton.tiles import load_rows


@triton.jit
def pairs_of_rows(g, start, first, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """D (ROWS, CHUNK) of tokens `first` … of the chunk whose gates begin at `start`.

    As `pairs_of` in `chunk_tiles.py`, of which these are some rows: no sum is a difference.
    """
    i, j = first + tl.arange(0, ROWS)[:, None], tl.arange(0, CHUNK)[None, :]
    decay = tl.full((ROWS, CHUNK), 1.0, tl.float32)
    if g is not None:
        following = tl.arange(0, CHUNK) + 1
        earlier = tl.load(g + start + following, mask=following < first, other=0.0)
        gates = tl.load(g + start + first + tl.arange(0, ROWS))
        until_first = tl.cumsum(earlier, axis=0, reverse=True)
        since_first = tl.cumsum(tl.where(i > j, gates[:, None], 0.0), axis=0)
        decay = tl.exp(until_first[None, :] + since_first)
    return tl.where(i >= j, decay, 0.0)


@triton.jit
def times(
    rows,
    directions,
    states,
    k,
    v,
    decay,
    reading,
    ridge,
    query,
    of_chunk,
    start,
    first,
    s,
    tokens,
    d,
    k_strides,
    v_strides,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(H + diag λ) row of tokens `first` … of a chunk, through the workspace."""
    # The rows of the last product have been read, and then these are complete.
    tl.debug_barrier()
    store_rows(directions, query, tokens, start + first, 0, rows, WIDTH)
    tl.debug_barrier()
    image = tl.zeros((ROWS, WIDTH), tl.float32)
    pairs = tl.zeros((ROWS, CHUNK), tl.float32)
    for c in range(0, WIDTH, KEYS):
        block = load_rows(directions, query, tokens, start + first, ROWS, KEYS, c, WIDTH)
        state = load_rows(states, of_chunk, WIDTH, c, KEYS, WIDTH, 0, WIDTH)
        image += product(block, state, PRECISION)
        keys = load_head(k, start, c, s, d, k_strides, CHUNK, KEYS)
        pairs += product(block, tl.trans(keys), PRECISION)
    values = load_head(v, start, 0, s, d, v_strides, CHUNK, WIDTH)
    image = image * reading[:, None] + ridge[None, :] * rows
    return image + product(pairs * decay, values, PRECISION)


@triton.jit
def length(rows):
    """‖row‖ of every row."""
    return tl.sqrt(tl.sum(rows * rows, axis=1))


@triton.jit
def ratio(a, b):
    """a / b, 0 where b is 0, as it is once a query is solved."""
    return tl.where(b == 0.0, 0.0, a / tl.where(b == 0.0, 1.0, b))


@triton.jit
def is_any(mask):
    """1 if an element is true, else 0."""
    return tl.max(mask.to(tl.int32), axis=0)


@triton.jit
def solve(
    q,
    k,
    v,
    gates,
    reading,
    states,
    ridge,
    directions,
    o,
    residuals,
    heads,
    queries,
    missing,
    s,
    t,
    tokens,
    d,
    q_strides,
    k_strides,
    v_strides,
    tolerance,
    rounding,
    most,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the solutions to `o` (b, t, m, r, d).

    `ridge` (m, r, d) is λ, and `directions` (m r, T, WIDTH) the workspace. `residuals` (m r,
    programs) gets the largest residual of a query, as a share of its length, that is not as small
    as `tolerance` and `rounding` allow; 0 if there is none. The solution of such a query is NaN.
    The first `missing` chunks have no query.
    """
    query = tl.program_id(1).to(tl.int64)
    head, row = query // queries, query % queries
    chunk = missing + tl.program_id(0) // (CHUNK // ROWS)
    start, first = chunk * CHUNK, tl.program_id(0) % (CHUNK // ROWS) * ROWS
    row_start = start + first
    channel = tl.arange(0, WIDTH)
    q = head_of(q, head, heads, q_strides) + row * q_strides.row
    k = head_of(k, head, heads, k_strides)
    v = head_of(v, head, heads, v_strides)
    of_chunk = head * (tokens // CHUNK) + chunk
    lam = tl.load(ridge + (head % heads * queries + row) * d + channel, mask=channel < d, other=0.0)
    at = head * tokens + start
    decay = pairs_of_rows(gates, at, first, ROWS, CHUNK)
    state_decay = tl.full((ROWS,), 1.0, tl.float32)
    if reading is not None:
        state_decay = tl.load(reading + at + first + tl.arange(0, ROWS))
    on_diagonal = tl.load(states + (of_chunk * WIDTH + channel) * WIDTH + channel)
    squares = load_head(k, start, 0, s, d, k_strides, CHUNK, WIDTH)
    squares *= load_head(v, start, 0, s, d, v_strides, CHUNK, WIDTH)
    diagonal = product(decay, squares, PRECISION) + state_decay[:, None] * on_diagonal[None, :]
    diagonal += lam[None, :]
    norm = tl.sum(diagonal, axis=1)
    # Padding has none.
    diagonal = tl.where(diagonal == 0.0, 1.0, diagonal)

    right = load_head(q, row_start - s + t, 0, t, d, q_strides, ROWS, WIDTH)
    size = tl.max(tl.abs(right), axis=1)
    size = tl.where((size > 0.0) & (size < float("inf")), size, 1.0)
    right = right / size[:, None]
    wanted = tolerance * length(right)
    x = tl.zeros((ROWS, WIDTH), tl.float32)
    rest = right
    over = tl.zeros((ROWS,), tl.float32)
    used = 0 * most
    is_open = is_any(wanted > 0.0)
    while is_open > 0:
        p = rest / diagonal
        energy = tl.sum(rest * p, axis=1)
        is_large = is_any(length(rest) > wanted)
        while (is_large > 0) & (used < most):
            image = times(
                p,
                directions,
                states,
                k,
                v,
                decay,
                state_decay,
                lam,
                query,
                of_chunk,
                start,
                first,
                s,
                tokens,
                d,
                k_strides,
                v_strides,
                ROWS,
                CHUNK,
                WIDTH,
                KEYS,
                PRECISION,
            )
            along = ratio(energy, tl.sum(p * image, axis=1))
            x += along[:, None] * p
            rest -= along[:, None] * image
            z = rest / diagonal
            before = energy
            energy = tl.sum(rest * z, axis=1)
            p = z + ratio(energy, before)[:, None] * p
            used += 1
            is_large = is_any(length(rest) > wanted)
        rest = load_head(q, row_start - s + t, 0, t, d, q_strides, ROWS, WIDTH) / size[:, None]
        rest -= times(
            x,
            directions,
            states,
            k,
            v,
            decay,
            state_decay,
            lam,
            query,
            of_chunk,
            start,
            first,
            s,
            tokens,
            d,
            k_strides,
            v_strides,
            ROWS,
            CHUNK,
            WIDTH,
            KEYS,
            PRECISION,
        )
        left = length(rest)
        is_over = left > wanted + rounding * norm * length(x)
        over = tl.where(is_over, ratio(left * tolerance, wanted), 0.0)
        is_open = tl.where(used < most, is_any(is_over), 0)
    x = tl.where((over > 0.0)[:, None], float("nan"), x)
    residual = residuals + query * tl.num_programs(0) + tl.program_id(0)
    tl.store(residual, tl.max(over, axis=0))
    o += ((head // heads * t * heads + head % heads) * queries + row) * d
    store_tokens(o, row_start - s + t, 0, t, d, heads * queries * d, x * size[:, None])
