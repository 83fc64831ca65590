"""Leaves with a state on CUDA kernels: the recurrence in chunks, or token by token."""

from __future__ import annotations

from collections.abc import Mapping

from precondattn.arrays import Array
from precondattn.frame import Frame
from precondattn.kernel_backend.stateful import StatefulKernels, decays, scale_in_form
from precondattn.spec.linear_family import LinearFamily
from precondattn_cupy.recurrence.channel_scan import ChannelScan
from precondattn_cupy.recurrence.chunkwise import Chunkwise


class RecurrenceKernels(StatefulKernels):
    """The linear family with at most one decay for each token, CCQ's query, and ATK's key."""

    def form(self, leaf: LinearFamily, x: Mapping[str, Array], frame: Frame) -> Chunkwise:  # type: ignore[override]
        return Chunkwise(decays=decays(leaf, frame), scale=scale_in_form(leaf, x))


class ChannelRecurrence(StatefulKernels):
    """The linear family with a decay for each key channel: GLA, KDA."""

    def form(self, leaf: LinearFamily, x: Mapping[str, Array], frame: Frame) -> ChannelScan:  # type: ignore[override]
        return ChannelScan(scale=scale_in_form(leaf, x))
