"""Rows of unit length, and the gradient, by `cuda/unit_rows.cu`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from precondattn.arrays import Array, Arrays, Residuals, namespace
from precondattn.backend import ArraySpec, Request
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn.kernel_backend.limits import refuses_eps
from precondattn.spec.unit_rows import UnitRows
from precondattn_cupy.launch import cpp_type, launch
from precondattn_cupy.layout import in_one_piece

WARPS = 4
"""Warps of a block; each has a row."""


class UnitRowsKernels:
    """Algorithm of the leaf `UnitRows`."""

    dtypes = ("float16", "bfloat16", "float32", "float64")

    def refuses(self, leaf: UnitRows, request: Request) -> str | None:
        if leaf.axis != "token":
            return "supports rows of tokens, not of channels"
        if 0 in dict(request.shapes)["o"]:
            return "supports no empty arrays"
        return refuses_eps(leaf.eps, request)

    def forward(
        self, leaf: UnitRows, x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        o = in_one_piece(x["o"])
        y = namespace(o).empty_like(o)
        _launch(f"unit_rows<{cpp_type(o)}>", o, (o, y), leaf)
        return y, ()

    def backward(
        self,
        leaf: UnitRows,
        x: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        o, d_y = in_one_piece(x["o"]), in_one_piece(cotangent)
        d_o = namespace(o).empty_like(o)
        detach = str(bool(leaf.detach)).lower()
        _launch(f"unit_rows_vjp<{cpp_type(o)}, {detach}>", o, (o, d_y, d_o), leaf)
        return {"o": d_o}

    def step(
        self, leaf: UnitRows, past: Mapping[str, Array], x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Updates]:
        """The forward pass of the new tokens, which do not depend on cached ones."""
        return self.forward(leaf, x, frame)[0], {}

    def residual_shapes(
        self, leaf: UnitRows, inputs: Mapping[str, ArraySpec]
    ) -> tuple[ArraySpec, ...]:
        return ()


def _launch(kernel: str, o: Array, arrays: tuple[Array, ...], leaf: UnitRows) -> None:
    width = o.shape[-1]
    rows = o.size // width
    computed = np.float64 if o.dtype == np.float64 else np.float32
    eps = computed(leaf.eps_above(float(np.finfo(computed).smallest_normal)))
    arguments = (*arrays, rows, width, eps)
    launch("unit_rows", kernel, (-(-rows // WARPS),), 32 * WARPS, arguments)
