"""Outlook attention: all windows are one batch, and the image of outputs is not modified."""

from __future__ import annotations

from sys import maxsize

from jax import Array

import precondattn as pa
from precondattn.arrays import Arrays, Index, Residuals
from precondattn.frame import Frame
from precondattn_jax.arithmetic import full_precision
from precondattn_jax.definition import AlgorithmInLoops
from precondattn_portable import outlook


class OutlookRows(AlgorithmInLoops[pa.Outlook], outlook.OutlookRows):
    """Algorithm of `Outlook`."""

    entries_together = maxsize

    def add(self, image: Array, where: Index, x: Array) -> Array:
        return image.at[where].add(x)

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        with full_precision():
            return super().forward(x, frame)

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        with full_precision():
            return super().backward(x, frame, out, residuals, cotangent)
