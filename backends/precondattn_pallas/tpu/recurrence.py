"""Leaves with a state on a TPU: as in `precondattn_pallas.recurrence`, by kernels of its own.

What a program has in VMEM must fit there: queries that read one state come at once.
"""

from __future__ import annotations

from typing import Any

import precondattn as pa
from precondattn.backend import Request
from precondattn_pallas.recurrence.leaves import Recurrence
from precondattn_pallas.tpu.chunkwise import CHUNK, on_a_tpu
from precondattn_pallas.tpu.launch import in_lanes

MOST_BYTES = 12 << 20
"""Of blocks and scratch, of the 16 MiB that a kernel is given: the rest is for what it computes."""


class TpuRecurrence(Recurrence):
    """Of leaves of the linear family with one decay for each state, and of CCQ's query."""

    form_of = staticmethod(on_a_tpu)

    def refuses(self, leaf: Any, request: Request) -> str | None:
        reason = super().refuses(leaf, request)
        if reason is not None:
            return reason
        if isinstance(leaf, (pa.GLA, pa.GSA)):
            return f"its recurrence has one decay for all of a state on a TPU; found {leaf}"
        shapes = dict(request.shapes)
        r = max(1, shapes["q"][2] // shapes["k"][2])
        d, e = shapes["k"][3], shapes.get("v", shapes["k"])[3]
        if isinstance(leaf, pa.Linear) and leaf.normalize:
            e += 1  # The sum of weights is one more channel.
        d, e = in_lanes(d), in_lanes(e)
        found = bytes_of(r, d, e)
        if found > MOST_BYTES:
            return (
                f"its recurrence takes {MOST_BYTES >> 20} MiB of a TPU's VMEM at most; "
                f"{r} queries to a state, d={d} and e={e} are {found / (1 << 20):.1f} MiB"
            )
        return None


def bytes_of(r: int, d: int, e: int) -> int:
    """What the gradient, the larger of the two kernels, has in VMEM: all blocks twice."""
    rows = CHUNK * (r * (2 * d + e) + 2 * d + 2 * e)
    return 4 * (2 * (rows + 3 * d * e) + d * e)
