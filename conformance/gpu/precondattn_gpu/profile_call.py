"""One call for a profiler: it is compiled and warmed up, then run once between two marks.

    python -m precondattn_gpu.profile_call BACKEND MECHANISM WORK BATCH TOKENS WIDTH

`ncu --profile-from-start off` measures what runs between the marks.
"""

from __future__ import annotations

import sys

from precondattn_conformance.inputs import CallLayout
from precondattn_gpu.options import CUDA
from precondattn_gpu.workload import workload

HEADS = 16


def main() -> None:
    backend, mechanism, work = sys.argv[1:4]
    batch, tokens, width = map(int, sys.argv[4:])
    layout = CallLayout(
        "profile", b=batch, t=tokens, s=tokens, h=HEADS, n=HEADS,
        d=width, e=width, values_per_head=1,
    )  # fmt: skip
    call = workload(mechanism, work, layout, "bfloat16", CUDA, backend)
    call()
    import torch

    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
