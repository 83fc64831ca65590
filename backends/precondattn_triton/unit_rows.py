"""Rows of unit length, and the gradient. Each row is read once.

    y = o / max(‖o‖, ε),    do = dy / max(‖o‖, ε),    or, with the norm differentiated and ‖o‖ > ε,
    do = (dy − y (y · dy)) / ‖o‖

A row is divided by its largest magnitude before it is squared, so that no square overflows or
underflows. Grid: one program per block of rows.
"""

from __future__ import annotations

from collections.abc import Mapping

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

WIDEST = 512
SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal
"""The smallest normal float32, the dtype in which rows are computed."""


@triton.jit
def load_row_tile(
    array, row, tokens, heads, width, array_b, array_t, array_h, array_e,
    rows, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows (b, t, h, ·) by their index in (b t h), in float32; 0 outside the array."""
    b, t, h = row // (tokens * heads), row // heads % tokens, row % heads
    channel = tl.arange(0, WIDTH).to(tl.int64)
    at = array + (b * array_b + t * array_t + h * array_h)[:, None] + channel[None, :] * array_e
    inside = (row < rows)[:, None] & (channel < width)[None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


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
def unit_rows(
    o, y, rows, tokens, heads, width, eps, o_b, o_t, o_h, o_e,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write `y` (b, t, h, e), which is contiguous."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows_in = load_row_tile(o, row, tokens, heads, width, o_b, o_t, o_h, o_e, rows, WIDTH)
    size, root, _ = divisors(rows_in, eps)
    channel = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (channel < width)[None, :]
    result = rows_in / size[:, None] / root[:, None]
    tl.store(
        y + row[:, None] * width + channel[None, :], result.to(y.dtype.element_ty), mask=inside
    )


@triton.jit
def unit_rows_vjp(
    o, d_y, d_o, rows, tokens, heads, width, eps, o_b, o_t, o_h, o_e, y_b, y_t, y_h, y_e,
    DETACH: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write `d_o` (b, t, h, e), which is contiguous."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows_in = load_row_tile(o, row, tokens, heads, width, o_b, o_t, o_h, o_e, rows, WIDTH)
    cotangent = load_row_tile(d_y, row, tokens, heads, width, y_b, y_t, y_h, y_e, rows, WIDTH)
    size, root, longer = divisors(rows_in, eps)
    if not DETACH:
        unit = rows_in / size[:, None] / root[:, None]
        along = tl.where(longer, tl.sum(unit * cotangent, axis=1), 0.0)
        cotangent -= unit * along[:, None]
    channel = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (channel < width)[None, :]
    gradient = cotangent / root[:, None] / size[:, None]
    at = d_o + row[:, None] * width + channel[None, :]
    tl.store(at, gradient.to(d_o.dtype.element_ty), mask=inside)


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
        eps = leaf.eps_above(SMALLEST_NORMAL)
        launch(
            unit_rows,
            grid,
            o,
            y,
            *sizes,
            eps,
            *o.stride(),
            **constants,
        )
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
        eps = leaf.eps_above(SMALLEST_NORMAL)
        launch(
            unit_rows_vjp, grid,
            o, cotangent, d_o, *sizes, eps, *o.stride(), *cotangent.stride(),
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


def _launch(o: Tensor) -> tuple[tuple[int], tuple[int, ...], dict[str, int]]:
    b, t, h, e = o.shape
    width = padded_width(e)
    tuned = configuration("unit_rows", width, o.dtype.itemsize == 2, o)
    grid = (cdiv(b * t * h, tuned.rows),)
    return (
        grid,
        (b * t * h, t, h, e),
        {"ROWS": tuned.rows, "WIDTH": width, "num_warps": tuned.warps},
    )
