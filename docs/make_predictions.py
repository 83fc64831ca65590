"""Write `measurements/predictions/triton.json`: predicted times of the kernels, before any run.

    python docs/make_predictions.py

The work and the roofs are computed (`precondattn_triton/work.py`, `roof.py`). The pace is a
person's estimate, from the kernel's machine code, with its reason. The file is not written again
once kernels have been measured, so that predictions are not changed afterwards.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from precondattn_kernel_tools.roof import H100, H200, LAUNCH_GAP, KernelWork, Size, prediction
from precondattn_triton import work
from precondattn_triton.configurations import REGISTRY, Configuration
from precondattn_triton.lucid.plan import NARROWEST_SOLVER, super_block_of

FOLDER = Path(__file__).with_name("measurements")
FILE = FOLDER / "predictions" / "triton.json"
HEADS, BATCH = 16, 4
DEVICES = (H100, H200)


class TritonGuess(NamedTuple):
    """An estimate for a kernel at one width, from its machine code."""

    call: str
    name: str
    width: int
    pace: float
    """The share of the roofline that the loop reaches on a fully occupied GPU."""
    resident: int
    """Resident programs per multiprocessor, by registers and shared memory."""
    reason: str


GUESSES = (
    TritonGuess("lucid_solve", "update", 128, 0.50, 1,
          "exponentials of a tile do not overlap with its products; one program on a processor"),
    TritonGuess("lucid_solve", "update", 64, 0.45, 2,
          "as at 128, but two programs overlap; exponentials take as long as products"),
    TritonGuess("lucid_solve", "substitute", 128, 0.50, 1,
          "64 programs, each a chain of products of 64 × 64 × 32 and 140 instructions each"),
    TritonGuess("lucid_solve", "update with key sums", 128, 0.45, 1,
          "as `update`, with two more products in the registers of a tile of 128 × 32"),
    TritonGuess("lucid_solve", "update with key sums", 64, 0.40, 1,
          "as at 128; exponentials take as long as products"),
    TritonGuess("lucid_solve", "key_gradient", 128, 0.50, 1,
          "products of 64 × 64 and 64 × 128; three in a row, with exponentials between"),
    TritonGuess("lucid_solve", "key_gradient", 64, 0.40, 1,
          "446 instructions per tile exceed what a warp scheduler issues beside the products"),
    TritonGuess("laser", "_close", 128, 0.55, 1,
          "one program per multiprocessor: softmax of one half overlaps products of the other"),
    TritonGuess("laser", "_close", 64, 0.45, 2,
          "as many instructions per exponential as at 128, for half the products"),
    TritonGuess("laser", "_query_gradient", 128, 0.55, 1,
          "products of 64 × 64 and 64 × 128, with 303 instructions per tile"),
    TritonGuess("laser", "_query_gradient", 64, 0.45, 4,
          "instructions of a tile are nearly as long as its products"),
    TritonGuess("laser", "_key_gradient", 128, 0.45, 1,
          "products of 64 × 32, with 244 instructions per tile"),
    TritonGuess("laser", "_key_gradient", 64, 0.40, 1,
          "instructions of a tile take longer than its products"),
    TritonGuess("gated_delta", "prepare", 128, 0.30, 2,
          "a chain of 18 products of 32 × 32 with float32's accuracy, by mma, then short loops"),
    TritonGuess("gated_delta", "carry_states", 128, 0.50, 1,
          "128 chunks in sequence with 16 barriers each; 256 programs on 132 multiprocessors"),
    TritonGuess("gated_delta", "read", 128, 0.60, 3,
          "one pass over the states; loads of the two halves of the keys overlap"),
    TritonGuess("gated_delta", "carry_gradients", 128, 0.35, 1,
          "128 chunks in sequence with 22 barriers each, and no load ahead"),
    TritonGuess("gated_delta", "d_inputs", 128, 0.35, 1,
          "one program of 8 warps at a time, at 240 registers: loads and products alternate"),
)  # fmt: skip

LUCID_TOKENS = (8192, 32768)

FLASH = (0.37, 0.28)
"""Shares of the tensor rate of PyTorch's flash attention, forward and backward: an estimate."""

OTHERS = {
    ("lucid", 8192): (0.06, 0.06),
    ("lucid", 32768): (0.20, 0.20),
    ("laser", 8192): (0.06, 0.12),
    ("laser", 32768): (0.15, 0.35),
    ("gated_delta", 8192): (0.01, 0.2),
}
"""Milliseconds of all other kernels of a call, forward and backward, at width 128: an estimate from
the bytes that they move and 3 µs for each launch. For LUCID these are the keys and the inverses."""

UNIT = 128
"""Tokens of the largest tile of LUCID's kernels."""


def size_of(call: str, tokens: int, width: int) -> Size:
    heads = HEADS * (BATCH if call == "gated_delta" else 1)
    return Size(heads, tokens, width, width)


def configuration(name: str, width: int) -> Configuration:
    return REGISTRY.find(name, width, True, architecture="sm_90")


def work_of(call: str, name: str, size: Size) -> KernelWork:
    """The work of a kernel in its configuration for Hopper."""
    at = {
        ("laser", "_close"): (work.close, "laser_forward"),
        ("laser", "_query_gradient"): (work.laser_query_gradient, "laser_query_gradient"),
        ("laser", "_key_gradient"): (work.laser_key_gradient, "laser_key_gradient"),
        ("gated_delta", "prepare"): (work.prepare, "delta_prepare"),
        ("gated_delta", "carry_states"): (work.carry_states, "chunk_states"),
        ("gated_delta", "read"): (work.read, "chunk_reads"),
        ("gated_delta", "carry_gradients"): (work.carry_gradients, "chunk_gradients"),
        ("gated_delta", "d_inputs"): (work.d_inputs, "chunk_input_gradient"),
    }
    if call == "lucid_solve":
        tile, least = configuration("lucid_inverse", size.d)[:2]
        block = super_block_of(size.tokens, least, UNIT)
        if name == "substitute":
            return work.substitute(size, tile, block, NARROWEST_SOLVER)
        if name == "key_gradient":
            return work.key_gradient(size, configuration("lucid_gradient", size.d), block)
        if name == "update":
            return work.update(size, configuration("lucid_update", size.d), block, tile)
        tiles = configuration("lucid_update_with_sums", size.d)
        return work.update(size, tiles, block, tile, key_sums=True)
    function, tiles = at[call, name]
    return function(size, configuration(tiles, size.d))


def kernels() -> list[dict[str, Any]]:
    """A row for each kernel and size."""
    rows = []
    for guess in GUESSES:
        for tokens in LUCID_TOKENS if guess.call != "gated_delta" else (8192,):
            size = size_of(guess.call, tokens, guess.width)
            done = work_of(guess.call, guess.name, size)
            row = prediction(done, size, DEVICES, guess.pace, guess.resident)
            rows.append({"call": guess.call, **row, "reason": guess.reason})
    return rows


def mechanisms(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole calls at width 128: the sums of their kernels, beside flash attention."""
    forward = {
        "lucid": ("update", "substitute"),
        "laser": ("_close",),
        "gated_delta": ("prepare", "carry_states", "read"),
    }
    backward = {
        "lucid": ("update with key sums", "substitute", "key_gradient"),
        "laser": ("_query_gradient", "_key_gradient"),
        "gated_delta": ("prepare", "carry_states", "carry_gradients", "d_inputs"),
    }
    seconds = {
        (row["call"], row["kernel"], row["tokens"]): row["devices"][H100.name]["seconds"]
        for row in rows
        if row["width"] == 128
    }
    calls = []
    for (mechanism, tokens), others in OTHERS.items():
        call = "lucid_solve" if mechanism == "lucid" else mechanism
        size = size_of(mechanism, tokens, 128)
        products = size.heads * tokens**2 / 2 * 2 * (size.d + size.e)
        flash = (products / (FLASH[0] * H100.half), 2.5 * products / (FLASH[1] * H100.half))
        parts = [
            sum(seconds[call, name, tokens] for name in names[mechanism]) + other * 1e-3
            for names, other in zip((forward, backward), others, strict=True)
        ]
        if mechanism == "lucid":  # Attention reads y.
            parts = [part + of_flash for part, of_flash in zip(parts, flash, strict=True)]
        for is_both, name in enumerate(("forward", "forward and backward")):
            own, peer = (sum(p) if is_both else p[0] for p in (parts, flash))
            calls.append(
                {
                    "mechanism": mechanism,
                    "work": name,
                    "heads": size.heads,
                    "tokens": tokens,
                    "seconds": own,
                    "flash": None if mechanism == "gated_delta" else peer,
                }
            )
    return calls


def main() -> None:
    if any((FOLDER / "gpu").glob("*/profile.json")):
        raise SystemExit("kernels have been measured: predictions are not written again")
    rows = kernels()
    content = {
        "devices": {d.name: d.source for d in DEVICES},
        "launch_gap": LAUNCH_GAP,
        "flash": FLASH,
        "kernels": rows,
        "mechanisms": mechanisms(rows),
    }
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
