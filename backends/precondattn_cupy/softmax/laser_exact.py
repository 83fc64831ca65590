"""LASER of heads whose values are far apart: launches of `cuda/laser_exact.cu`.

Blocks of close heads return at once.
"""

from __future__ import annotations

from precondattn.arrays import Array, Arrays
from precondattn_cupy.configurations import padded_width
from precondattn_cupy.launch import Argument, cpp_type, launch
from precondattn_cupy.softmax.attention import LOG2_E, PART, SoftmaxCall

WARPS, OTHERS = 8, 32
"""Tokens of a block, one for each warp, and of a tile of the other side."""


def forward(call: SoftmaxCall, v: Array, out: Array, full: Array, log_total: Array) -> None:
    """Compute o and λ, in the arrays to which the kernels of close heads write."""
    t, _, h, _, _, e, *_ = call.sizes
    channels = min(max(padded_width(e), 32), PART)
    _launch(
        call,
        f"forward<{cpp_type(v)}, {_width(call)}, {channels}>",
        (-(-t // WARPS) * -(-e // channels), h),
        (v, call.is_chosen, out, full, log_total, *call.masks, call.scale * LOG2_E),
        OTHERS * (channels + 1) + WARPS * OTHERS,
    )


def backward(
    call: SoftmaxCall, v: Array, full: Array, log_total: Array, d_out: Array, result: Arrays
) -> None:
    t, s, h, n, _, e, *_ = call.sizes
    widths = f"{_width(call)}, {max(padded_width(e), 32)}"
    scales = (call.scale * LOG2_E, call.scale)
    for of_keys, tokens, heads in ((False, t, h), (True, s, n)):
        results = (result["k"], result["v"]) if of_keys else (result["q"], None)
        keys, queries = (WARPS, OTHERS) if of_keys else (OTHERS, WARPS)
        _launch(
            call,
            f"gradient<{cpp_type(v)}, {str(of_keys).lower()}, {widths}>",
            (-(-tokens // WARPS), heads),
            (v, call.is_chosen, d_out, full, log_total, *results, *call.masks, *scales),
            (keys + 2 * queries) * 33,
        )


def _width(call: SoftmaxCall) -> int:
    return padded_width(call.q.shape[3])


def _launch(
    call: SoftmaxCall,
    kernel: str,
    blocks: tuple[int, int],
    arguments: tuple[Argument, ...],
    numbers: int,
) -> None:
    """Launch with shared memory for rows of queries and keys, and further numbers of 4 bytes."""
    rows = (WARPS + OTHERS) * (_width(call) + 1)
    launch(
        "laser_exact",
        f"laser_exact_{kernel}",
        (*blocks, call.q.shape[0]),
        32 * WARPS,
        (call.q, call.k, *arguments, *call.sizes),
        4 * (rows + numbers),
    )
