"""A step of softmax attention or LASER by one token, by `cuda/softmax_decode.cu`."""

from __future__ import annotations

from collections.abc import Mapping

from precondattn.arrays import Array, namespace
from precondattn.backend import Request
from precondattn.cache import Append, Updates
from precondattn.frame import Frame
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.softmax import Softmax
from precondattn_cupy.configurations import padded_width
from precondattn_cupy.launch import GRID_LIMITS, cpp_type, launch
from precondattn_cupy.layout import empty, in_one_piece, past_of, processors
from precondattn_cupy.softmax.attention import LOG2_E, refusal

WARPS, COLUMNS, ROWS = 4, 16, 16
"""Warps of a block; cached tokens of a warp's tile; query heads of a tile."""
BLOCKS_PER_PROCESSOR = 2
"""Blocks per multiprocessor that read the cache: enough to hide memory latency."""
MOST_SPLITS = 64
"""The most splits of a cache. Four parts per split are read again to combine them."""
WIDEST = {"k": 256, "v": 128}
COMBINING_THREADS = 128


def refusal_of_step(leaf: Softmax, request: Request) -> str | None:
    """The reason why the kernels do not support an extension of a cache, or None."""
    shapes = dict(request.shapes)
    if shapes["q"][1] != 1:
        return f"its step supports one token; found t={shapes['q'][1]}"
    if leaf.window is not None:
        return "its step has no window"
    for name, kind in (("k", "keys"), ("v", "values")):
        if shapes[name][3] > WIDEST[name]:
            return (
                f"its step supports {kind} of at most {WIDEST[name]} channels; "
                f"found {shapes[name][3]}"
            )
    if shapes["q"][0] > GRID_LIMITS[2] or shapes["q"][2] > GRID_LIMITS[1]:
        return f"its step supports at most {GRID_LIMITS[1]} sequences, and as many heads"
    return refusal("attention", leaf, request)


def step(
    leaf: Softmax, past: Mapping[str, Array], x: Mapping[str, Array], frame: Frame
) -> tuple[Array, Updates]:
    xp = namespace(x["q"])
    names = leaf.program.slot_keys[0]
    # Buffers of `init_cache` have the kernels' layout; others are copied.
    keys, values = (
        in_one_piece(xp.permute_dims(past[names[name]], (0, 2, 3, 1))) for name in ("key", "value")
    )
    q, k, v = (in_one_piece(x[name]) for name in "qkv")
    (b, _, h, d), (n, e) = q.shape, v.shape[2:]
    capacity = keys.shape[3]
    count, valid, q_valid, k_valid = past_of(frame, b, capacity)
    tiles = -(-(h // n) // ROWS)
    splits, per_split = _splits(count, b * n * tiles)
    outs = empty(q, (b, h, splits * WARPS, e), "float32")
    logs = empty(q, (b, h, splits * WARPS), "float32")
    scale = leaf.scale_for(d) * LOG2_E
    is_laser = leaf.read == LOG_MEAN_EXP
    widths = padded_width(d), padded_width(e)
    if splits:
        kernel = "read_laser" if is_laser else "read_softmax"
        launch(
            "softmax_decode",
            f"{kernel}<{cpp_type(q)}, {COLUMNS}, {widths[0]}, {widths[1]}>",
            (splits, n * tiles, b),
            32 * WARPS,
            (q, keys, values, valid, outs, logs, scale, count, capacity, per_split, h, n, d, e),
            shared_bytes(widths, q.dtype.itemsize, is_laser=is_laser),
        )
    out = empty(v, (b, 1, h, e))
    launch(
        "softmax_decode",
        f"combine<{cpp_type(q)}, {str(is_laser).lower()}>",
        (h, b),
        COMBINING_THREADS,
        (q, k, v, q_valid, k_valid, outs, logs, out, scale, splits * WARPS, h, n, d, e),
    )
    return out, {names["key"]: Append(x["k"]), names["value"]: Append(x["v"])}


def shared_bytes(widths: tuple[int, int], itemsize: int, *, is_laser: bool) -> int:
    """Shared memory: queries, two tiles of slots and their validity; with LASER also scores."""
    tokens = WARPS * COLUMNS
    of_slots = sum(widths) * (tokens * itemsize + 16) + tokens
    scores = WARPS * ROWS * COLUMNS * 4 if is_laser else 0
    return ROWS * (widths[0] * itemsize + 16) + of_slots + scores


def _splits(count: int, heads: int) -> tuple[int, int]:
    """The number of blocks that share a head's tokens, and tokens of each: whole tiles."""
    tile = WARPS * COLUMNS
    tiles = -(-count // tile)
    wanted = min(max(BLOCKS_PER_PROCESSOR * processors() // heads, 1), MOST_SPLITS)
    per_split = -(-tiles // min(wanted, max(tiles, 1))) * tile
    return (-(-count // per_split) if count else 0), per_split
