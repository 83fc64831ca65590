"""LASER of heads whose values are far apart: launches of `cuda/laser_exact_*.cu`.

Blocks of close heads return at once.
"""

from __future__ import annotations

from precondattn.arrays import Array, Arrays
from precondattn_cupy.configurations import Configuration, configuration, declare, padded_width
from precondattn_cupy.launch import Argument, cpp_type, launch
from precondattn_cupy.softmax.attention import LOG2_E, PART, SoftmaxCall

CHANNELS = 32
"""Value channels that are processed at once, as in `laser_exact.cuh`."""

for _kernel in ("forward", "query_gradient", "key_gradient", "values"):
    declare(
        f"laser_exact_{_kernel}",
        half={128: Configuration(64, 32), 256: Configuration(64, 16)},
        full={128: Configuration(64, 32), 256: Configuration(32, 32)},
    )


def forward(call: SoftmaxCall, v: Array, out: Array, full: Array, log_total: Array) -> None:
    """Compute o and λ, in the arrays to which the kernels of close heads write."""
    t, _, h, _, _, e, *_ = call.sizes
    tile, widths = _tile(call, "forward")
    _launch(
        call, f"laser_exact_forward<{cpp_type(v)}, {widths}>", "forward",
        (-(-t // tile.rows) * -(-e // CHANNELS), h), tile,
        (call.q, call.k, v, call.is_chosen, out, full, log_total, *call.masks,
         call.scale * LOG2_E),
        channels=tile.columns, numbers=tile.columns,
    )  # fmt: skip


def backward(
    call: SoftmaxCall,
    v: Array,
    full: Array,
    log_total: Array,
    d_out: Array,
    result: Arrays,
) -> None:
    t, s, h, n, d, e, *_ = call.sizes
    inputs = (call.q, call.k, v, call.is_chosen, d_out, full, log_total)
    scales = (call.scale * LOG2_E, call.scale)
    for name, side, tokens, heads in (("query", "q", t, h), ("key", "k", s, n)):
        tile, widths = _tile(call, f"{name}_gradient")
        rows, columns = tile
        keys, queries = (rows, columns) if side == "k" else (columns, rows)
        is_of_keys = str(side == "k").lower()
        _launch(
            call, f"laser_exact_gradient<{cpp_type(v)}, {is_of_keys}, {widths}>", "backward",
            (-(-tokens // rows) * -(-d // PART), heads), tile,
            (*inputs, result[side], *call.masks, *scales),
            channels=keys + 2 * queries, numbers=queries + columns,
        )  # fmt: skip
    tile, widths = _tile(call, "values")
    _launch(
        call, f"laser_exact_values<{cpp_type(v)}, {widths}>", "backward",
        (-(-s // tile.rows) * -(-e // CHANNELS), n), tile,
        (*inputs, result["v"], *call.masks, scales[0]),
        channels=2 * tile.columns, numbers=2 * tile.columns,
    )  # fmt: skip


def _tile(call: SoftmaxCall, kernel: str) -> tuple[Configuration, str]:
    """The tile of a kernel, and its part of the name expression."""
    width = padded_width(call.q.shape[3])
    tile = configuration(f"laser_exact_{kernel}", width, call.q.dtype.itemsize == 2)
    return tile, f"{tile.rows}, {tile.columns}, {width}"


def _launch(
    call: SoftmaxCall,
    name: str,
    file: str,
    blocks: tuple[int, int],
    tile: Configuration,
    arguments: tuple[Argument, ...],
    *,
    channels: int,
    numbers: int,
) -> None:
    """Launch with shared memory for rows of channels and for single 4-byte numbers."""
    row_bytes = padded_width(call.q.shape[3]) * call.q.dtype.itemsize + 16
    launch(
        f"laser_exact_{file}",
        name,
        (*blocks, call.q.shape[0]),
        tile.threads,
        (*arguments, *call.sizes),
        (tile.rows + tile.columns) * row_bytes
        + channels * 4 * (CHANNELS + 1)
        + tile.rows * 4 * (tile.columns + 1)
        + numbers * 4,
    )
