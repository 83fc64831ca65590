"""Write `measurements/predictions/triton.json`: predicted times of the kernels, before any run.

    python docs/make_predictions.py

The work and the roofs are computed (`precondattn_triton/work.py`, `roof.py`). The pace is a
person's estimate, from the kernel's machine code, with its reason. The file is not written again
once kernels have been measured, so that predictions are not changed afterwards.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from precondattn_gpu.lucid_parts import configuration, lucid_work
from precondattn_kernel_tools.roof import H100, H200, LAUNCH_GAP, KernelWork, Size, prediction
from precondattn_triton import work
from precondattn_triton.path.backward import REFLECTION_ELEMENTS
from precondattn_triton.path.blocks import block_size

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
          "as `update`, with two more products in the registers of a tile of 128 × 64"),
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
    TritonGuess("gla", "channel_scores", 128, 0.20, 2,
          "1,124 instructions around 10 products of 32 channels, and 32 stores of 2 bytes"),
    TritonGuess("gla", "carry_states", 128, 0.50, 2,
          "as in `gated_delta`, with half the products"),
    TritonGuess("gla", "read", 128, 0.60, 4,
          "a loop of 49 instructions, whose loads are not ahead of its 4 products"),
    TritonGuess("gla", "read_back", 128, 0.60, 4,
          "two loads, one after the other, and a product"),
    TritonGuess("gla", "carry_gradients", 128, 0.35, 2,
          "as in `gated_delta`, with two thirds of the products"),
    TritonGuess("gla", "d_scores_of", 128, 0.50, 4,
          "a loop of 58 instructions for 4 products, and no load ahead"),
    TritonGuess("gla", "channel_gradient", 128, 0.20, 2,
          "1,339 instructions around 20 products of 64 × 32, and 64 stores of 2 bytes"),
    TritonGuess("gla", "d_queries", 128, 0.50, 3,
          "the states and do of a block in two loads without overlap"),
    TritonGuess("gla", "d_keys_of", 128, 0.45, 4,
          "products of 64 × 16, whose loads are not ahead"),
    TritonGuess("kda", "channel_scores", 128, 0.20, 2,
          "as in `gla`, in blocks of 16 channels, with a second product per pair of blocks"),
    TritonGuess("kda", "channel_gradient", 128, 0.20, 2,
          "as in `gla`, in blocks of 16 channels, and pairs of two kinds"),
    TritonGuess("kda", "d_written", 128, 0.50, 4,
          "a short loop without a load ahead"),
    TritonGuess("kda", "d_keys_of", 128, 0.40, 3,
          "as in `gla`, with a second product"),
    TritonGuess("path", "_forward", 128, 0.40, 1,
          "8 warps of 232 registers; pairs within a block take a chain of products of 32 columns"),
    TritonGuess("path", "carry", 128, 0.30, 1,
          "a chain of up to 16 chunks for each tile of queries, each with two dependent products"),
    TritonGuess("path", "query_gradient", 128, 0.30, 1,
          "within a block, mma with 16 barriers per chunk of 32 keys, and no load ahead"),
    TritonGuess("path", "key_value_gradient", 128, 0.30, 1,
          "products of 64 × 16, and 548 instructions for 36 of them; mma within a block"),
    TritonGuess("path", "reflections", 128, 0.40, 1,
          "two products per load of 32 rows, none ahead; 135 instructions for each"),
)  # fmt: skip

LENGTHS = dict.fromkeys(("lucid_solve", "laser"), (8192, 32768))
"""The numbers of tokens of a call, if there are others than 8,192."""

FLASH = (0.37, 0.28)
"""Shares of the tensor rate of PyTorch's flash attention, forward and backward: an estimate."""

OTHERS = {
    ("lucid", 8192): (0.06, 0.06),
    ("lucid", 32768): (0.20, 0.20),
    ("laser", 8192): (0.06, 0.12),
    ("laser", 32768): (0.15, 0.35),
    ("gated_delta", 8192): (0.01, 0.2),
    ("gla", 8192): (0.01, 0.15),
    ("path", 8192): (0.15, 1.2),
}
"""Milliseconds of all other kernels of a call, forward and backward, at width 128: an estimate from
the bytes that they move and 3 µs for each launch. For LUCID these are the keys and the inverses,
for PaTH all that is within chunks, and the matrices of blocks."""

WITHOUT_FLASH = ("gated_delta", "gla")
"""Recurrences, which are not compared with flash attention."""


def size_of(call: str, tokens: int, width: int) -> Size:
    heads = HEADS * (BATCH if call == "gated_delta" else 1)
    return Size(heads, tokens, width, width)


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
        ("gla", "channel_scores"): (work.channel_scores, "channel_scores"),
        ("gla", "carry_states"): (partial(work.carry_states, erases=False), "chunk_states"),
        ("gla", "read"): (partial(work.read, is_by_channel=True), "chunk_reads"),
        ("gla", "read_back"): (work.read_back, "chunk_reads"),
        ("gla", "carry_gradients"): (
            partial(work.carry_gradients, erases=False),
            "chunk_gradients",
        ),
        ("gla", "d_scores_of"): (work.d_scores_of, "chunk_scores_gradient"),
        ("gla", "channel_gradient"): (work.channel_gradient, "channel_gradient"),
        ("gla", "d_queries"): (work.d_queries, "chunk_query_gradient"),
        ("gla", "d_keys_of"): (work.d_keys_of, "chunk_key_gradient"),
        ("kda", "channel_scores"): (partial(work.channel_scores, erases=True), "channel_scores"),
        ("kda", "channel_gradient"): (
            partial(work.channel_gradient, erases=True),
            "channel_erase_gradient",
        ),
        ("kda", "d_written"): (work.d_written, "delta_keys"),
        ("kda", "d_keys_of"): (partial(work.d_keys_of, erases=True), "chunk_key_gradient"),
    }
    if call == "path":
        return path_work_of(name, size)
    if call == "lucid_solve":
        return lucid_work(name, size)
    function, tiles = at[call, name]
    return function(size, configuration(tiles, size.d))


def path_work_of(name: str, size: Size) -> KernelWork:
    """The work of a kernel of PaTH, with blocks."""
    chunk = configuration("path_chunks", size.d).rows
    block = block_size(size.tokens, chunk)
    if name == "reflections":
        return work.path_reflections(size, REFLECTION_ELEMENTS // size.d, chunk, block)
    if name == "_forward":
        return work.path_forward(size, configuration("path_forward", size.d), chunk, block)
    if name == "carry":
        return work.path_carry(size, configuration("path_carry", size.d), chunk, block)
    function, tiles = {
        "query_gradient": (work.path_query_gradient, "query_gradient"),
        "key_value_gradient": (work.path_key_gradient, "key_gradient"),
    }[name]
    own, of_blocks = (configuration(f"{of}_{tiles}", size.d) for of in ("path", "path_block"))
    return function(size, own, of_blocks, chunk, block)


def kernels() -> list[dict[str, Any]]:
    """A row for each kernel and size."""
    rows = []
    for guess in GUESSES:
        for tokens in LENGTHS.get(guess.call, (8192,)):
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
        "gla": ("channel_scores", "carry_states", "read"),
        "path": ("_forward",),
    }
    backward = {
        "lucid": ("update with key sums", "substitute", "key_gradient"),
        "laser": ("_query_gradient", "_key_gradient"),
        "gated_delta": ("prepare", "carry_states", "carry_gradients", "d_inputs"),
        "gla": (
            *("channel_scores", "carry_states", "read_back", "carry_gradients"),
            *("d_scores_of", "channel_gradient", "d_queries", "d_keys_of"),
        ),
        "path": ("carry", "query_gradient", "key_value_gradient", "reflections"),
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
                    "flash": None if mechanism in WITHOUT_FLASH else peer,
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
