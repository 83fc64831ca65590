"""One forward and backward call of a peer in this process, to compile its kernels and check it.

    python -m precondattn_gpu.peer_call fla gated_delta SIZES --dtype bfloat16 --device cuda …

Triton keeps the compiled kernels and tuned configurations on disk for the process that times them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from precondattn_conformance.bench.peers import lacks, peers_of
from precondattn_conformance.bench.selection import Selection
from precondattn_gpu import device_inputs
from precondattn_gpu.timed_call import checked_in_torch


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a peer once, and compare it.")
    for name in ("peer", "mechanism", "sizes"):
        parser.add_argument(name)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    (case,) = Selection(
        mechanisms=(options.mechanism,), works=("forward_backward",), sizes=(options.sizes,),
        dtype=options.dtype, peers=(options.peer,), device=options.device,
    ).cases()  # fmt: skip
    (peer,) = peers_of(case)
    if reason := lacks(peer, case, options.device):
        options.result.write_text(json.dumps({"status": "unsupported", "message": reason}))
        return
    x = device_inputs.make(case.parsed, case.layout, case.dtype, options.device)
    checked = checked_in_torch(peer.make(case.parsed, None), x, case).checked
    result = {"status": "passed", "message": "", "error": checked.error, "bound": checked.bound}
    options.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
