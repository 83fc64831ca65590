"""Measured rates of this device: a bfloat16 matrix product of 8192³, and a copy within its memory.

python -m precondattn_gpu.rates --device cuda --result FILE
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from precondattn_conformance.bench.paired import spread
from precondattn_gpu.device_clock import TorchClock, in_turns
from precondattn_gpu.options import CPU

SIZE, COPIED = 8192, 2 << 30
"""The size of the product's matrices, and the bytes that are copied."""
ON_A_CPU = 32
"""The factor by which sizes are smaller on a CPU, in each direction."""
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description="The rates of this device.")
    parser.add_argument("--device", required=True)
    parser.add_argument("--ptxas", default="", help="the assembler that Triton is to use")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    share = ON_A_CPU if options.device == CPU else 1
    size, count = SIZE // share, COPIED // share
    # Zeros would need less power, and run faster than data.
    a, b = (torch.randn(size, size, device=options.device).bfloat16() for _ in range(2))
    source = torch.empty(count, dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    clock = TorchClock(options.device)
    times = in_turns(
        {"product": (clock, lambda: a @ b), "copy": (clock, lambda: target.copy_(source))}, ROUNDS
    )
    seconds = {name: spread(each).median for name, each in times.items()}
    rates = {"flops": 2 * size**3 / seconds["product"], "bytes": 2 * count / seconds["copy"]}
    # A CPU interprets the kernels, without an assembler.
    is_used = options.device == CPU or not options.ptxas or options.ptxas == _assembler()
    more = {"versions": _versions(), "is_other_assembler": not is_used}
    options.result.write_text(json.dumps(rates | more))


def _assembler() -> str:
    """The path of the assembler that Triton uses."""
    from triton import knobs

    return str(knobs.nvidia.ptxas.path)


def _versions() -> dict[str, str]:
    """The versions of Triton's assembler and of PyTorch's CUDA."""
    from precondattn_triton.target import assembler

    return {"assembler": assembler(), "cuda": str(torch.version.cuda)}


if __name__ == "__main__":
    main()
