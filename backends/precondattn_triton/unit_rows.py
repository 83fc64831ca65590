"""Rows of unit length, and the gradient. Each row is read once.

    y = o / max(‖o‖, ε),    do = dy / max(‖o‖, ε),    or, with the norm differentiated and ‖o‖ > ε,
    do = (dy − y (y · dy)) / ‖o‖

A row is divided by its largest magnitude before it is squared, so that no square overflows or
underflows. Grid: one program per block of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from precondattn.backend import ArraySpec, Request
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn.kernel_backend.limits import padded_width, refuses_eps
from precondattn.spec.unit_rows import UnitRows
from precondattn_triton.configurations import configuration
from precondattn_triton.launching import cdiv, launch
from precondattn_triton.tiles import heads

WIDEST = 512
SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal
"""The smallest normal float32, the dtype in which rows are computed."""


class RowSizes(NamedTuple):
    """The sizes of an array (b, tokens, heads, width), as an argument of a kernel."""

    rows: int
    tokens: int
    heads: int
    width: int


@triton.jit
def load_row_tile(x, row, sizes, WIDTH: tl.constexpr):
    """Rows of `Heads` (b, t, h, ·) by their index in (b t h), in float32; 0 outside the array."""
    h, t = sizes.heads, sizes.tokens
    of_row = row // (t * h) * x.batch + row // h % t * x.token + row % h * x.head
    channel = tl.arange(0, WIDTH).to(tl.int64)
    inside = (row < sizes.rows)[:, None] & (channel < sizes.width)[None, :]
    at = x.array + of_row[:, None] + channel[None, :] * x.channel
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_row_tile(array, row, sizes, tile, WIDTH: tl.constexpr):
    """Store rows by their index in a contiguous array."""
    channel = tl.arange(0, WIDTH)
    inside = (row < sizes.rows)[:, None] & (channel < sizes.width)[None, :]
    at = array + row[:, None] * sizes.width + channel[None, :]
    tl.store(at, tile.to(array.dtype.element_ty), mask=inside)


@triton.jit
def divisors(o, eps):
    """For each row, two factors of max(‖o‖, ε), and whether ‖o‖ > ε."""
    size = tl.max(tl.abs(o), axis=1)
    is_nonzero = size > 0
    size = tl.where(is_nonzero, size, 1.0)
    scaled = o / size[:, None]
    root = tl.sqrt(tl.where(is_nonzero, tl.sum(scaled * scaled, axis=1), 1.0))
    longer = is_nonzero & (size > eps / root)
    least_norm = tl.where(eps > 0, eps, 1.0)
    return tl.where(longer, size, least_norm), tl.where(longer, root, 1.0), longer


@triton.jit
def unit_rows(o, y, sizes, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Write `y` (b, t, h, e), which is contiguous."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows_in = load_row_tile(o, row, sizes, WIDTH)
    size, root, _ = divisors(rows_in, eps)
    store_row_tile(y, row, sizes, rows_in / size[:, None] / root[:, None], WIDTH)


@triton.jit
def unit_rows_vjp(
    o, d_y, d_o, sizes, eps, DETACH: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Write `d_o` (b, t, h, e), which is contiguous."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows_in = load_row_tile(o, row, sizes, WIDTH)
    cotangent = load_row_tile(d_y, row, sizes, WIDTH)
    size, root, longer = divisors(rows_in, eps)
    if not DETACH:
        unit = rows_in / size[:, None] / root[:, None]
        along = tl.where(longer, tl.sum(unit * cotangent, axis=1), 0.0)
        cotangent -= unit * along[:, None]
    store_row_tile(d_o, row, sizes, cotangent / root[:, None] / size[:, None], WIDTH)


class UnitRowsKernels:
    """The leaf `UnitRows`."""

    def refuses(self, leaf: UnitRows, request: Request) -> str | None:
        if leaf.axis != "token":
            return "supports rows of tokens, not of channels"
        shape = dict(request.shapes)["o"]
        if shape[3] > WIDEST:
            return f"supports rows of at most {WIDEST} entries; found {shape[3]}"
        if 0 in shape:
            return "supports no empty arrays"
        return refuses_eps(leaf.eps, request)

    def forward(
        self, leaf: UnitRows, x: Mapping[str, Tensor], frame: Frame
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        o = x["o"]
        y = torch.empty_like(o, memory_format=torch.contiguous_format)
        grid, sizes, constants = _launch(o)
        launch(unit_rows, grid, heads(o), y, sizes, leaf.eps_above(SMALLEST_NORMAL), **constants)
        return y, ()

    def backward(
        self,
        leaf: UnitRows,
        x: Mapping[str, Tensor],
        frame: Frame,
        out: Tensor,
        residuals: tuple[Tensor, ...],
        cotangent: Tensor,
    ) -> dict[str, Tensor]:
        o = x["o"]
        d_o = torch.empty_like(o, memory_format=torch.contiguous_format)
        grid, sizes, constants = _launch(o)
        launch(
            unit_rows_vjp, grid,
            heads(o), heads(cotangent), d_o, sizes, leaf.eps_above(SMALLEST_NORMAL),
            DETACH=leaf.detach, **constants,
        )  # fmt: skip
        return {"o": d_o}

    def step(
        self, leaf: UnitRows, past: Mapping[str, Tensor], x: Mapping[str, Tensor], frame: Frame
    ) -> tuple[Tensor, Updates]:
        """The forward pass of the new tokens: each row depends on one token only."""
        return self.forward(leaf, x, frame)[0], {}

    def residual_shapes(
        self, leaf: UnitRows, inputs: Mapping[str, ArraySpec]
    ) -> tuple[ArraySpec, ...]:
        return ()


def _launch(o: Tensor) -> tuple[tuple[int], RowSizes, dict[str, int]]:
    b, t, h, e = o.shape
    width = padded_width(e)
    tuned = configuration("unit_rows", width, o.dtype.itemsize == 2, o)
    constants = {"ROWS": tuned.rows, "WIDTH": width, "num_warps": tuned.warps}
    return (cdiv(b * t * h, tuned.rows),), RowSizes(b * t * h, t, h, e), constants
