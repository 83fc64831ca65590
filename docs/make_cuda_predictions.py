"""Write `measurements/predictions/cuda.json`: predicted times of the CUDA kernels.

    python docs/make_cuda_predictions.py

The work and the roofs are computed (`precondattn_cupy/work.py`, `roof.py`). The pace is a person's
estimate from the kernel's machine code, with its reason. The file is not written again once kernels
have been measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from precondattn_cupy import work
from precondattn_cupy.work import TiledSize
from precondattn_kernel_tools.roof import H100, H200, LAUNCH_GAP, KernelWork, prediction

FILE = Path(__file__).with_name("measurements") / "predictions" / "cuda.json"
HEADS, BATCH = 16, 4
DEVICES = (H100, H200)


class CudaGuess(NamedTuple):
    """An estimate for a kernel at one width, from its machine code."""

    call: str
    work: Callable[[TiledSize], KernelWork]
    width: int
    pace: float
    """The share of the roofline that the loop reaches on a fully occupied GPU."""
    resident: int
    """Resident programs per multiprocessor, by registers and shared memory."""
    reason: str


GUESSES = (
    CudaGuess("lucid_solve", work.lucid_update, 128, 0.40, 2,
          "mma.sync reaches about two thirds of the tensor rate, and a program's loads and stores "
          "of right sides overlap only with the other program"),
    CudaGuess("lucid_solve", work.lucid_apply, 128, 0.25, 1,
          "loads for the largest right side in 16 rounds, then up to 8 dependent products"),
    CudaGuess("lucid_solve", work.lucid_systems, 128, 0.20, 4,
          "one tile in nine of a row is inverted in float32, 16 rows at a time in sequence"),
    CudaGuess("lucid_solve", work.lucid_join, 128, 0.10, 4,
          "tiles are loaded and multiplied one after the other, with two barriers each"),
    CudaGuess("lucid_solve", work.lucid_key_gradient, 128, 0.35, 2,
          "loads do not overlap with the products of the same program"),
    CudaGuess("softmax", work.softmax_forward, 128, 0.35, 2,
          "mma.sync, and 14 other instructions for each"),
    CudaGuess("softmax", work.softmax_forward, 64, 0.30, 2,
          "mma.sync, and 16 other instructions for each"),
    CudaGuess("softmax", work.softmax_query_gradient, 128, 0.35, 2,
          "loads do not overlap with the products of the same program"),
    CudaGuess("softmax", work.softmax_key_gradient, 128, 0.30, 2,
          "tiles of 16 queries, so that two barriers and a wait for loads come with every 64 mma"),
    CudaGuess("gated_delta", work.delta_prepare, 128, 0.25, 4,
          "the inverse: a chain of 16 rows and 4 products in float32, with barriers between"),
    CudaGuess("gated_delta", work.carry_states, 128, 0.35, 2,
          "128 chunks in sequence, each with a wait for its loads and three barriers"),
    CudaGuess("gated_delta", work.read_chunks, 128, 0.40, 4,
          "three loads of shared memory for each mma in tf32; scores are computed four times"),
    CudaGuess("gated_delta", work.carry_gradients, 128, 0.30, 1,
          "128 chunks in sequence, each with two waits for loads and five barriers"),
)  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """A row for each kernel and size."""
    found = []
    for guess in GUESSES:
        for tokens in (8192, 32768) if guess.call != "gated_delta" else (8192,):
            heads = HEADS * (BATCH if guess.call == "gated_delta" else 1)
            size = TiledSize(heads, tokens, guess.width, guess.width)
            row = prediction(guess.work(size), size, DEVICES, guess.pace, guess.resident)
            found.append({"call": guess.call, **row, "reason": guess.reason})
    return found


def main() -> None:
    if any((FILE.parent.parent / "gpu").glob("*/profile.json")):
        raise SystemExit("kernels have been measured: predictions are not written again")
    content = {
        "devices": {device.name: device.source for device in DEVICES},
        "launch_gap": LAUNCH_GAP,
        "kernels": rows(),
    }
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
