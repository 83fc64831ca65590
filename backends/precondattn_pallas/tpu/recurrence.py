"""Leaves with a state, as in `precondattn_pallas.recurrence`, with the kernels for a TPU.

The blocks of a program must fit VMEM; all queries of a state are loaded at once.
"""

from __future__ import annotations

from precondattn.backend import Request
from precondattn.spec.stateful import Stateful
from precondattn_pallas.recurrence.leaves import RecurrenceKernels
from precondattn_pallas.tpu.chunkwise import CHUNK, on_a_tpu
from precondattn_pallas.tpu.launch import in_lanes

MOST_BYTES = 12 << 20
"""Bytes of blocks and scratch, of a kernel's 16 MiB: the rest is for intermediate results."""


class TpuRecurrence(RecurrenceKernels):
    """Algorithm of linear leaves with one decay for each state, and of CCQ's query."""

    form_of = staticmethod(on_a_tpu)

    def refuses(self, leaf: Stateful, request: Request) -> str | None:
        reason = super().refuses(leaf, request)
        if reason is not None:
            return reason
        shapes = dict(request.shapes)
        r = max(1, shapes["q"][2] // shapes["k"][2])
        d, e = shapes["k"][3], shapes.get("v", shapes["k"])[3]
        if leaf.declares is not None and leaf.declares.normaliser == "sum":
            e += 1  # The sum of weights is one more channel.
        d, e = in_lanes(d), in_lanes(e)
        size = bytes_of(r, d, e)
        if size > MOST_BYTES:
            return (
                f"its recurrence has at most {MOST_BYTES >> 20} MiB of a TPU's VMEM; "
                f"{r} queries to a state, d={d} and e={e} need {size / (1 << 20):.1f} MiB"
            )
        return None


def bytes_of(r: int, d: int, e: int) -> int:
    """Bytes of VMEM that the gradient's kernel needs, the larger of the two: each block twice."""
    rows = CHUNK * (r * (2 * d + e) + 2 * d + 2 * e)
    return 4 * (2 * (rows + 3 * d * e) + d * e)
