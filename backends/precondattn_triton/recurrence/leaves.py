"""Leaves with a state: the options of the chunkwise kernels for each leaf.

For half precision, factors in float32 are multiplied as tf32, except where outputs are divided by a
sum that may cancel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from precondattn.frame import Frame
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


class RecurrenceKernels(StatefulKernels):
    """The linear family (GLA, GatedDelta, KDA …), GSA, CCQ's query, and the key that ATK writes."""

    def form(self, leaf: Stateful, x: Mapping[str, Tensor], frame: Frame) -> Chunkwise:
        return form_of(leaf, x, frame)
