"""One call for a profiler: compiled and warmed up first, then run once between two marks.

ncu --profile-from-start off … python -m precondattn_gpu.profile_call MECHANISM WORK D
"""

from __future__ import annotations

import sys

from precondattn_conformance.inputs import Layout
from precondattn_gpu.options import CUDA
from precondattn_gpu.workload import workload

TOKENS, BATCH, HEADS = 8192, 2, 16


def main() -> None:
    mechanism, work, d = sys.argv[1], sys.argv[2], int(sys.argv[3])
    layout = Layout(
        "profile", b=BATCH, t=TOKENS, s=TOKENS, h=HEADS, n=HEADS, d=d, e=d, m=64, values_per_head=1
    )
    call = workload(mechanism, work, layout, "bfloat16", CUDA)
    call()
    import torch

    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
