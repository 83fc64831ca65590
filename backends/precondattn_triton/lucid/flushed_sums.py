"""New tokens of LUCID in PaTH's metric: their sums over the cached keys before the last flush.

These keys have been transported to the flush. With x_i the normalised new key carried back to the
flush through all reflections since (`borders.py`), and r_j = rms(k_j) that of the original key,

    P_i = Σ_j Φ_ij y_j,    Φ_ij = e^{s x_i · κ_j / r_j − s d},

with no reflection between tiles. A part of the keys has its own sums, which are added in order.

Grid: one program per tile of rows, head, and part and block of channels of y. c (d + e)
products for each new token of a key/value head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.softmax.score_tiles import add_product
from precondattn_triton.tiles import addresses, is_token, load_rows, load_tile


@triton.jit(do_not_specialize=["count", "first_row", "tokens"])
def flushed_sums(
    rows, keys, norms, solved, lengths, valid, sums,
    count, heads, tokens, first_row, flush, per_part, scale, shift, width,
    key_b, key_c, key_n, key_d, norm_b, norm_c, norm_n, y_b, y_c, y_n, y_e,
    D: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr, TWO_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write P of the rows from `first_row` on to `sums` (parts, m, tokens − first_row, STEP).

    `rows` are x (m, tokens, KEY_WIDTH), `keys` κ (b, c, n, D), `norms` r (b, c, n) or None, and
    `solved` y (b, c, n, width), of which the first `count` slots may be read; `valid` (b, count).
    """
    CHANNELS: tl.constexpr = STEP // WIDTH
    FACTOR: tl.constexpr = tl.float16 if HALF else tl.float32
    index = tl.program_id(1).to(tl.int64)
    batch, head = index // heads, index % heads
    part, first = tl.program_id(2) // CHANNELS, tl.program_id(2) % CHANNELS * WIDTH
    row = tl.program_id(0) * ROWS
    x = load_rows(rows, index, tokens, first_row + row, ROWS, KEY_WIDTH, 0, KEY_WIDTH).to(FACTOR)
    keys += batch * key_b + head * key_n
    solved += batch * y_b + head * y_n
    length = tl.load(lengths + batch)
    low = part * per_part
    high = tl.minimum(tl.minimum(low + per_part, length - length % flush), count)
    channels = first + tl.arange(0, WIDTH)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(low, high, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        is_key = (columns < high) & is_token(valid, batch, columns, count)
        key_tile = load_tile(keys, columns, is_key, key_c, key_d, D, KEY_WIDTH)
        if norms is not None:
            at = norms + batch * norm_b + head * norm_n + columns.to(tl.int64) * norm_c
            norm = tl.load(at, mask=is_key, other=1.0)
            key_tile = key_tile.to(tl.float32) / tl.where(norm > 0, norm, 1.0)[:, None]
        scores = tl.dot(x, tl.trans(key_tile.to(FACTOR)), input_precision=PRECISION)
        phi_tile = tl.where(is_key[None, :], tl.exp2(scores * scale - shift), 0.0)
        # Slots that are not valid may contain NaN.
        inside = is_key[:, None] & (channels < width)[None, :]
        values = tl.load(addresses(solved, columns, y_c, channels, y_e), mask=inside, other=0.0)
        total = add_product(phi_tile, values, total, PRECISION, TWO_PARTS)
    row += (part * tl.num_programs(1) + index) * (tokens - first_row) + tl.arange(0, ROWS)
    tl.store(sums + row[:, None] * STEP + channels[None, :], total)
