"""Leaves with a state: the options of the chunkwise kernels for each leaf.

For half precision, factors in float32 are multiplied as tf32, except where outputs are divided by a
sum that may cancel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from precondattn.frame import Frame
from precondattn.kernel_backend.precise import is_precise
from precondattn.kernel_backend.stateful import StatefulKernels, decays, scale_in_form
from precondattn.spec.stateful import Stateful
from precondattn_triton.precision import exact, is_half, product_precision
from precondattn_triton.recurrence.chunkwise import Chunkwise


def form_of(leaf: Stateful, x: Mapping[str, Tensor], frame: Frame) -> Chunkwise:
    """The recurrence in chunks for a leaf and its inputs."""
    dtype = x["k" if "k" in x else "v"].dtype
    # The outputs are divided by a sum of weights that may cancel.
    declared = leaf.declares
    divides = declared is not None and declared.normaliser == "sum" and dtype != torch.float32
    return Chunkwise(
        exact() if divides else product_precision(dtype),
        half=is_half(dtype),
        decays=decays(leaf, frame),
        scale=scale_in_form(leaf, x),
    )


WIDEST_OF_CHANNELS = 512
"""The largest width of keys with a gate each, in bfloat16. A program that carries a state reads all
channels of a chunk's keys: more than 256 in float32, as also for float16, do not fit registers."""


class RecurrenceKernels(StatefulKernels):
    """The linear family (GLA, GatedDelta, KDA …), GSA, CCQ's query, and the key that ATK writes."""

    widens_gates, has_zero_state = False, True

    def widest_keys(self, leaf: Stateful, dtype: str) -> int:
        declared = leaf.declares
        is_wide = declared is not None and declared.gate == "channel"
        # Factors of 32 bits would not fit.
        if is_wide and dtype == "bfloat16" and not is_precise():
            return WIDEST_OF_CHANNELS
        return super().widest_keys(leaf, dtype)

    def form(self, leaf: Stateful, x: Mapping[str, Tensor], frame: Frame) -> Chunkwise:
        return form_of(leaf, x, frame)
