"""Flash attention: launches of `cuda/softmax_forward.cu` and `cuda/softmax_backward.cu`.

Values are one array, or the sum of two 16-bit arrays, and may have another type than queries and
keys. λ is (b, h, t) in units of log 2, ∞ for a query without visible keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from precondattn.arrays import Array
from precondattn.backend import Request
from precondattn.frame import Frame
from precondattn.kernel_backend.attention_options import declined_option
from precondattn.spec.metric import DOT
from precondattn.spec.softmax import Softmax
from precondattn_cupy.configurations import Configuration, configuration, padded_width
from precondattn_cupy.launch import GRID_LIMITS, Argument, cpp_type, launch
from precondattn_cupy.layout import KernelMasks, empty, masks_of

LOG2_E = math.log2(math.e)
SMALLEST = 2.0**-126
"""The smallest normal number of float32"""
WIDEST = {"k": 256, "v": 512}
PART = 128
"""Channels of the output that a block computes."""
EVERYWHERE = 1 << 30
"""How far a query without a window attends; there are fewer tokens than that."""
ROW_WARPS = 8
"""Warps of a block of `row_products`; each has a row."""


class Values(NamedTuple):
    """Values (b, s, n, e)"""

    array: Array
    rest: Array | None = None
    """The rounding error of the first array"""

    @property
    def parts(self) -> int:
        return 1 if self.rest is None else 2

    @property
    def cpp_type(self) -> str:
        """The C++ type; two parts are bfloat16, whatever the dtype of the array that holds them."""
        return cpp_type(self.array) if self.rest is None else "__nv_bfloat16"


class SoftmaxCall(NamedTuple):
    """The arrays and sizes of a call, for forward and backward. Arrays are contiguous."""

    q: Array
    k: Array
    v: Values
    masks: KernelMasks
    scale: float
    lookback: int
    lookahead: int
    is_chosen: Array | None = None
    """(b, n), the heads to which `v` applies; None for all."""

    @property
    def log_scale(self) -> float:
        """The scale times log₂ e; above 0 in float32, since masked scores are −∞ before scaling."""
        return max(self.scale * LOG2_E, SMALLEST)

    @property
    def sizes(self) -> tuple[int, ...]:
        """t, s, h, n, d and e, and how far a query attends before and after its position."""
        _, t, h, d = self.q.shape
        _, s, n, e = self.v.array.shape
        return t, s, h, n, d, e, self.lookback, self.lookahead


def call_of(
    leaf: Softmax, q: Array, k: Array, v: Values, frame: Frame, is_chosen: Array | None = None
) -> SoftmaxCall:
    around = EVERYWHERE if leaf.window is None else min(leaf.window - 1, EVERYWHERE)
    masks = masks_of(frame, *q.shape[:2])
    lookahead = 0 if leaf.causal else around
    return SoftmaxCall(q, k, v, masks, leaf.scale_for(q.shape[3]), around, lookahead, is_chosen)


def refusal(algorithm: str, leaf: Softmax, request: Request) -> str | None:
    """The reason why the kernels do not support a full call, or None."""
    if leaf.metric != DOT:
        return f"has kernels for {algorithm} with scores <q, k> only, not of {leaf.name}"
    reason = declined_option(leaf, algorithm)
    if reason is not None:
        return reason
    shapes = dict(request.shapes)
    for name, kind in (("k", "keys"), ("v", "values")):
        if shapes[name][3] > WIDEST[name]:
            return (
                f"has kernels for {algorithm} with {kind} of at most {WIDEST[name]} channels; "
                f"found {shapes[name][3]}"
            )
    if 0 in shapes["q"] + shapes["v"]:
        return f"its {algorithm} supports no empty arrays"
    if max(shapes["q"][0], shapes["q"][2]) > GRID_LIMITS[1]:
        return f"its {algorithm} supports at most {GRID_LIMITS[1]} sequences, and as many heads"
    if max(shapes["q"][1], shapes["k"][1]) >= EVERYWHERE:
        return f"its {algorithm} supports fewer than {EVERYWHERE} tokens"
    return None


def attend(call: SoftmaxCall, out: Array | None, full: Array | None) -> Array:
    """λ; the output is written to `out` in its dtype, and to `full` in float32, where present."""
    (b, t, h, d), e = call.q.shape, call.v.array.shape[3]
    log_total = empty(call.q, (b, h, t), "float32")
    widths = padded_width(d), min(padded_width(e), PART)
    tile, name = _chosen(call, "forward", widths)
    of_row, of_value = _row_bytes(call, widths)
    _launch(
        call, "softmax_forward", name, -(-t // tile.rows) * -(-e // widths[1]), h, tile,
        (call.q, call.k, *call.v, call.is_chosen, out, full, log_total, *call.masks,
         call.log_scale),
        tile.rows * of_row + 2 * tile.columns * (of_row + of_value + 4),
    )  # fmt: skip
    return log_total


def row_products(call: SoftmaxCall, d_o: Array, o: Array, log_total: Array) -> Array:
    """D (b, h, t) = Σ do ∘ o; o in float32."""
    (b, t, h, _), e = call.q.shape, o.shape[3]
    d_sum = empty(log_total, log_total.shape)
    launch(
        "softmax_backward",
        f"row_products<{cpp_type(d_o)}>",
        (-(-t // ROW_WARPS), h, b),
        32 * ROW_WARPS,
        (d_o, o, log_total, d_sum, t, h, e),
    )
    return d_sum


def query_gradient(
    call: SoftmaxCall, d_o: Values, log_total: Array, d_sum: Array, d_q: Array
) -> None:
    _, t, h, d = call.q.shape
    widths = padded_width(d), padded_width(call.v.array.shape[3])
    tile, name = _chosen(call, "query_gradient", widths)
    _launch(
        call, "softmax_backward", name, -(-t // tile.rows) * -(-d // PART), h, tile,
        (call.q, call.k, *call.v, call.is_chosen, *d_o, log_total, d_sum, d_q, None, None,
         *call.masks, call.log_scale, call.scale),
        (tile.rows + tile.columns) * sum(_row_bytes(call, widths)) + tile.columns * 4,
    )  # fmt: skip


def key_gradient(
    call: SoftmaxCall,
    d_o: Values,
    log_total: Array,
    d_sum: Array,
    d_k: Array,
    d_v: Array | None,
    d_v_full: Array | None,
) -> None:
    d, (_, s, n, e) = call.q.shape[3], call.v.array.shape
    widths = padded_width(d), padded_width(e)
    tile, name = _chosen(call, "key_gradient", widths)
    _launch(
        call, "softmax_backward", name, -(-s // tile.rows) * -(-max(d, e) // PART), n, tile,
        (call.q, call.k, *call.v, call.is_chosen, *d_o, log_total, d_sum, d_k, d_v, d_v_full,
         *call.masks, call.log_scale, call.scale),
        (tile.rows + tile.columns) * sum(_row_bytes(call, widths)) + tile.columns * 12,
    )  # fmt: skip


def _chosen(call: SoftmaxCall, kernel: str, widths: tuple[int, int]) -> tuple[Configuration, str]:
    """The tiles of a kernel, and its name expression."""
    width = max(widths[0], padded_width(call.v.array.shape[3]))
    name = f"softmax_{kernel}" + ("_of_two" if call.v.parts == 2 else "")
    tile = configuration(name, width, call.q.dtype.itemsize == 2)
    numbers = tile.rows, tile.columns, *widths
    arguments = [cpp_type(call.q), call.v.cpp_type, call.v.parts, *numbers]
    if kernel != "forward":
        arguments.insert(3, str(kernel == "key_gradient").lower())
        kernel = "gradient"
    return tile, f"softmax_{kernel}<{', '.join(map(str, arguments))}>"


def _row_bytes(call: SoftmaxCall, widths: tuple[int, int]) -> tuple[int, int]:
    """Bytes of a token's key and of its value in shared memory."""
    key, value = call.q.dtype.itemsize, call.v.array.dtype.itemsize
    return widths[0] * key + 16, call.v.parts * (widths[1] * value + 16)


def _launch(
    call: SoftmaxCall,
    file: str,
    name: str,
    blocks: int,
    heads: int,
    tile: Configuration,
    arguments: tuple[Argument, ...],
    shared_bytes: int,
) -> None:
    launch(
        file,
        name,
        (blocks, heads, call.q.shape[0]),
        tile.threads,
        (*arguments, *call.sizes),
        shared_bytes,
    )
