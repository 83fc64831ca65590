"""A step of LUCID by one token: from the cache's buffers to launches of `lucid_decode.cu`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from precondattn.algebra.piece import Piece
from precondattn.arrays import Array, namespace
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn.kernel_backend.lucid import LucidStepKernels, leaves_of
from precondattn_cupy.configurations import configuration, padded_width
from precondattn_cupy.launch import cpp_type, launch
from precondattn_cupy.layout import by_16, empty, in_one_piece, past_of, processors
from precondattn_cupy.lucid.solve import LOG2_E

BLOCKS_PER_PROCESSOR = 8
"""Blocks of `lucid_read` per multiprocessor: enough to hide memory latency with few warps each."""
MOST_ROWS = 64
"""The most query heads of a key/value head, plus 1 for the new key."""
FINISHING_THREADS = 128


class LucidStep(LucidStepKernels):
    """The group `y1 = lucid_solve(k, v); out = softmax(q, k, v=y1)`."""

    fitting = f"fewer than {MOST_ROWS} query heads to a key/value head"

    def fits(self, rows: int, dtype: str, width: int) -> bool:
        return rows <= MOST_ROWS

    def step(
        self, group: Piece, past: Mapping[str, Array], x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Updates]:
        solve, softmax = leaves_of(group)
        solve_keys = group.program.slot_keys[0]
        xp = namespace(x["q"])
        keys, solved = (
            in_one_piece(xp.permute_dims(past[solve_keys[name]], (0, 2, 3, 1)))
            for name in ("key", "solved")
        )
        rms = None
        if solve.normalize == "keys":
            rms = in_one_piece(xp.permute_dims(past[solve_keys["rms"]], (0, 2, 1)))
        q, k, v = (in_one_piece(x[name]) for name in "qkv")
        beta = in_one_piece(x["lucid_beta"]) if solve.beta else None
        b, _, h, d = q.shape
        n, e = v.shape[2:]
        capacity = keys.shape[3]
        cached = past_of(frame, b, capacity)
        counts = None
        if cached.valid is not None:
            position = xp.broadcast_to(frame.q_position[:, 0], (b,))
            counts = in_one_piece(xp.astype(position, xp.int32))
        key_width, width = padded_width(d), padded_width(e)
        rows = padded_width(h // n + 1)
        half = q.dtype.itemsize == 2
        tuned = configuration("lucid_decode", max(key_width, width), half)._replace(rows=rows)
        splits, per_split = splits_of(cached.slots, b * n, tuned.columns)
        parts = (b * n, splits, h // n + 1)
        totals = empty(q, (*parts, width), np.float32)
        maxima, sums = (empty(q, parts, np.float32) for _ in range(2))
        scale, key_scale = softmax.scale_for(d) * LOG2_E, solve.scale_for(d) * LOG2_E
        launch(
            "lucid_decode",
            f"lucid_read<{cpp_type(q)}, {rows}, {tuned.columns}, {key_width}, {width}>",
            (splits, b * n),
            tuned.threads,
            (
                q, k, keys, solved, rms, cached.valid, counts, totals, maxima, sums, cached.slots,
                capacity, per_split, n, h // n, d, e, solve.eps, scale, key_scale, key_scale * d,
                np.bool_(by_16(keys)),
            ),
            shared_bytes(rows, tuned.columns, key_width, width, q.dtype.itemsize),
        )  # fmt: skip
        out, y = empty(v, (b, 1, h, e)), empty(v, (b, 1, n, e))
        own_rms = None if rms is None else empty(v, (b, 1, n), np.float32)
        launch(
            "lucid_decode",
            f"lucid_finish<{cpp_type(q)}>",
            (h // n, b * n),
            FINISHING_THREADS,
            (
                q, k, v, beta, cached.is_query, cached.is_key, counts, totals, maxima, sums, out,
                y, own_rms, cached.slots, capacity, per_split, splits, n, d, e, width, solve.eps,
                scale,
            ),
        )  # fmt: skip
        return out, self.updates(group, x["k"], y, own_rms)


def shared_bytes(rows: int, tokens: int, key_width: int, width: int, itemsize: int) -> int:
    """Bytes shared by `lucid_read`: rows, two tiles of slots, weights in 1 or 2 parts, 1 / rms."""
    weights = rows * 4 // itemsize if itemsize == 2 else rows
    of_slots = (key_width + width + weights) * (tokens * itemsize + 16)
    return rows * (key_width * itemsize + 16) + of_slots + 4 * tokens


def splits_of(count: int, heads: int, tile: int) -> tuple[int, int]:
    """The number of blocks that share a head's tokens, and the tokens of each, in whole tiles."""
    tiles = max(-(-count // tile), 1)
    wanted = max(BLOCKS_PER_PROCESSOR * processors() // heads, 1)
    per_split = -(-tiles // min(wanted, tiles)) * tile
    return max(-(-count // per_split), 1), per_split
