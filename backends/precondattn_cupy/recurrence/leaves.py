"""Leaves with a state on CUDA kernels: the recurrence, token by token."""

from __future__ import annotations

from collections.abc import Mapping

from precondattn.arrays import Array
from precondattn.frame import Frame
from precondattn.kernel_backend.stateful import StatefulKernels, scale_in_form
from precondattn.spec.linear_family import LinearFamily
from precondattn_cupy.recurrence.scan import Scan


class RecurrenceKernels(StatefulKernels):
    """The linear family with a decay for each token or key channel, CCQ's query, and ATK's key."""

    def form(self, leaf: LinearFamily, x: Mapping[str, Array], frame: Frame) -> Scan:  # type: ignore[override]
        return Scan(scale=scale_in_form(leaf, x))
