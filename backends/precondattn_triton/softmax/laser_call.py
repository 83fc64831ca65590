"""A call of LASER, as its kernels read it.

Each kernel has the arguments of `LaserCall.arguments`, in this order, after its own arrays:

    q_valid, k_valid, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
    scale, t, s, h, n, the strides of q, the strides of k
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from precondattn.kernel_backend.attention_options import BIAS, SLOPES, SOFTCAP
from precondattn.kernel_backend.limits import padded_width
from precondattn_triton.configurations import Configuration, configuration
from precondattn_triton.launching import Constant
from precondattn_triton.softmax.score_options import ScoreOptions
from precondattn_triton.softmax.widths import WIDEST_KEY, is_wide
from precondattn_triton.tiles import KernelMasks, configured, factor_dtype

SUPPORTED = BIAS, SOFTCAP, SLOPES
"""The options of the kernels, besides a window. LASER has no sink: its weights sum to one."""


class LaserCall(NamedTuple):
    """The inputs of a call: one dtype, any strides."""

    q: torch.Tensor
    """(b, t, h, d)"""
    k: torch.Tensor
    """(b, s, n, d)"""
    v: torch.Tensor
    """(b, s, n, e)"""
    masks: KernelMasks
    options: ScoreOptions
    scale: float
    causal: bool

    @property
    def arguments(self) -> tuple[object, ...]:
        """The arguments that all kernels have, from `q_valid` on."""
        (t, h), (s, n) = self.q.shape[1:3], self.k.shape[1:3]
        sizes = self.scale, t, s, h, n
        strides = *self.q.stride(), *self.k.stride()
        return (*self.masks, *self.options.arguments, *sizes, *strides)

    @property
    def constants(self) -> dict[str, Constant]:
        """The constants that all kernels have."""
        return {"CAUSAL": self.causal, "D": self.q.shape[3], "E": self.v.shape[3]}

    @property
    def is_exact(self) -> bool:
        """Whether scores have all digits of float32."""
        return bool(self.v.dtype == torch.float32)

    def configured(self, kernel: str) -> Configuration:
        """The configuration of a kernel for close heads.

        With options, tiles are those of softmax attention, and gradients in float32 have those of
        its widest rows: others do not fit the registers.
        """
        if self.is_plain:
            return configured(f"laser_{kernel}", self.q, self.v)
        width = max(self.padded_key, self.padded_value)
        if kernel != "forward" and self.is_exact:
            width = WIDEST_KEY
        return configuration(f"softmax_{kernel}", width, self.has_half_factors, self.v)

    @property
    def padded_key(self) -> int:
        return padded_width(self.q.shape[3])

    @property
    def padded_value(self) -> int:
        return padded_width(self.v.shape[3])

    @property
    def is_wide(self) -> bool:
        """Whether keys or values are wider than a tile."""
        dtype = str(self.v.dtype).removeprefix("torch.")
        if not self.is_plain and not self.has_half_factors:
            dtype = "float32"  # Its tiles are those of softmax attention with such factors.
        return is_wide(dtype, self.q.shape[3], self.v.shape[3])

    @property
    def is_plain(self) -> bool:
        """Whether no option changes scores or masks."""
        return all(option is None for option in self.options)

    @property
    def has_half_factors(self) -> bool:
        """Whether exponentials have 16 bits in products."""
        return bool(factor_dtype(self.v.dtype) == torch.bfloat16)
