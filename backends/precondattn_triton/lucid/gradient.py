"""The gradient of LUCID's keys: pairs of tiles before and after a tile of keys.

    dk̂_a = −s Σ_b Φ_ab g_ab k̂_b,    g_ab = dv_a · y_b  (b before a),  dv_b · y_a  (b after a),

and through the norm, dk = (dk̂ − k̂ (k̂ · dk̂) / d) / rms(k). Φ is recomputed in tiles of ROWS and
COLUMNS keys. Where `update` has summed the tokens b of later super-blocks (`substitution.py`), this
kernel begins with its sums, and visits later tokens of the same super-block only. Grid: one program
per tile of keys and head. It loops over the tiles of the same segments, before and after its own.
No two programs add to the same element, so the result is deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.lucid.tiles import phi, reach
from precondattn_triton.tiles import addresses, load_rows, load_tokens, start_of


@triton.jit
def products(
    left, left_start, right, right_start, i_start, j_start, s, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """⟨left_i, right_j⟩ of two tiles of tokens of `Heads`, a chunk of channels at a time."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        first = chunk * WIDTH
        i = load_tokens(left_start, i_start, first, s, width, left.token, left.channel, ROWS, WIDTH)
        j = load_tokens(
            right_start, j_start, first, s, width, right.token, right.channel, COLUMNS, WIDTH
        )
        total += tl.dot(i, tl.trans(j.to(i.dtype)), input_precision=PRECISION)
    return total


@triton.jit
def weighted_keys(
    g, a_keys, keys, segments, head, tokens, a_start, b_start, scale, shift,
    COLUMNS: tl.constexpr, KEY_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    IS_HALF: tl.constexpr,
):  # fmt: skip
    """Σ_b Φ_ab g_ab k̂_b over a tile of b.

    Where keys nearly coincide, the norm's gradient takes most of this sum away, and with it most
    digits. So factors have the 11 bits of the keys' float16, not the 8 of bfloat16. g is not
    bounded, and each of its rows is divided by its largest element.
    """
    b_keys = load_rows(keys, head, tokens, b_start, COLUMNS, KEY_WIDTH, 0, KEY_WIDTH)
    g *= phi(a_keys, b_keys, segments, a_start, b_start, scale, shift, PRECISION)
    if not IS_HALF:
        return tl.dot(g, b_keys.to(tl.float32), input_precision=PRECISION)
    largest = tl.max(tl.abs(g), axis=1)
    largest = tl.where(largest > 0, largest, 1.0)[:, None]
    return tl.dot((g / largest).to(b_keys.dtype), b_keys) * largest


@triton.jit
def key_gradient(
    keys, reciprocal, segments, y, d_v, key_sums, d_k,
    parts, s, heads, tokens, key_width, width, scale, shift, score_scale,
    NORMALIZE: tl.constexpr, SUPER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of dk (b, s, n, d), contiguous; y and dv (b, s, n, e) are 0 for invalid tokens.

    With SUPER > 0, `key_sums` (parts, m, T, KEY_WIDTH) has parts of sums over later super-blocks.
    """
    head = tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    if segments is not None:
        segments += b * 2 * tokens
    y_start, d_v_start = start_of(y, b, n), start_of(d_v, b, n)
    # The last tiles come first: with SUPER they have the most work.
    a_start = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    a_keys = load_rows(keys, head, tokens, a_start, ROWS, KEY_WIDTH, 0, KEY_WIDTH)
    a, column = a_start + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, KEY_WIDTH), tl.float32)
    IS_HALF: tl.constexpr = keys.dtype.element_ty == tl.float16
    # Tiles that cross the diagonal are in both loops, each time with one side of it masked.
    first, first_after, end = 0, a_start // COLUMNS * COLUMNS, s
    if segments is not None:
        begin, end_of_rows = reach(segments, tokens, a_start, ROWS)
        first, end = begin // COLUMNS * COLUMNS, tl.minimum(s, end_of_rows)
    if SUPER > 0:
        end_of_block = (a_start // SUPER + 1) * SUPER
        if end_of_block < tokens:
            for part in range(parts):
                total += load_rows(
                    key_sums, part * tl.num_programs(1) + head, tokens, a_start, ROWS, KEY_WIDTH, 0,
                    KEY_WIDTH,
                )  # fmt: skip
        end = tl.minimum(end, end_of_block)
    for b_start in range(first, a_start + ROWS, COLUMNS):
        g = products(
            d_v, d_v_start, y, y_start, a_start, b_start, s, width,
            ROWS, COLUMNS, WIDTH, CHUNKS, PRECISION,
        )  # fmt: skip
        g = tl.where(a[:, None] > (b_start + column)[None, :], g, 0.0)
        total += weighted_keys(
            g, a_keys, keys, segments, head, tokens, a_start, b_start,
            scale, shift, COLUMNS, KEY_WIDTH, PRECISION, IS_HALF,
        )  # fmt: skip
    for b_start in range(first_after, end, COLUMNS):
        g = products(
            y, y_start, d_v, d_v_start, a_start, b_start, s, width,
            ROWS, COLUMNS, WIDTH, CHUNKS, PRECISION,
        )  # fmt: skip
        g = tl.where(a[:, None] < (b_start + column)[None, :], g, 0.0)
        total += weighted_keys(
            g, a_keys, keys, segments, head, tokens, a_start, b_start,
            scale, shift, COLUMNS, KEY_WIDTH, PRECISION, IS_HALF,
        )  # fmt: skip
    total *= -score_scale
    if NORMALIZE:
        one_by_rms = tl.load(reciprocal + head * tokens + a)
        unit = a_keys.to(tl.float32)
        along = tl.sum(unit * total, axis=1) / key_width
        total = (total - unit * along[:, None]) * one_by_rms[:, None]
    channel = tl.arange(0, KEY_WIDTH)
    inside = (a < s)[:, None] & (channel < key_width)[None, :]
    at = addresses(d_k + (b * s * heads + n) * key_width, a, heads * key_width, channel, 1)
    tl.store(at, total.to(d_k.dtype.element_ty), mask=inside)
