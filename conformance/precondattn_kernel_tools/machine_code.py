"""Instruction counts of a compiled kernel on an NVIDIA GPU, read from its machine code.

    python -m precondattn_kernel_tools.machine_code MODULE --target sm_90 --match NAME --save FILE

`MODULE.variants(target)` yields variants of `triton_compiler` or of `cuda_compiler`. Each is
compiled, and NVIDIA's disassembler, which Triton includes, prints its machine code (SASS). The
table has one line for the whole kernel and one for each loop, indented by depth. A loop is the code
that a backward branch repeats. Its line counts what one warp issues in one iteration, with one
iteration of each inner loop. Instructions that a predicate or a branch skips are counted too.

| column | instructions | |---|---| | tensor | products on tensor cores: HGMMA (wgmma, of 4 warps
together), HMMA (mma), … | | load, store | accesses to global memory, by bits of one thread: `128:4`
are four of 16 bytes | | async | asynchronous copies from global to shared memory: LDGSTS
(cp.async), UTMALDG (TMA) | | shared | loads and stores of shared memory, matrices by LDSM and STSM
included | | local | loads and stores of local memory: spilled registers, arrays with variable
indices | | special | by MUFU, at an eighth of the rate of a product of float32: EX2 (exp2), LG2,
RCP … | | fp32 | additions and products of float32 | | convert | conversions of numbers: F2FP (two
at a time) is fast, F2F as slow as MUFU | | shuffle, barrier | exchanges within a warp; waits for
other warps |
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from precondattn_kernel_tools.ahead_of_time import AnyVariant, selected, variants_of
from precondattn_kernel_tools.cuda_toolkit import MissingToolError

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

COLUMNS = (
    *("tensor", "load", "store", "async", "shared", "local"),
    *("special", "fp32", "convert", "shuffle", "barrier"),
)

KINDS = {
    **dict.fromkeys(("HGMMA", "QGMMA", "IGMMA", "BGMMA", "HMMA", "IMMA", "DMMA", "QMMA"), "tensor"),
    **dict.fromkeys(("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCMXQMMA", "OMMA"), "tensor"),
    **{"LDG": "load", "STG": "store"},
    **dict.fromkeys(("LDGSTS", "UTMALDG", "UTMASTG", "UBLKCP"), "async"),
    **dict.fromkeys(("LDS", "STS", "LDSM", "STSM"), "shared"),
    **dict.fromkeys(("LDL", "STL"), "local"),
    "MUFU": "special",
    **dict.fromkeys(("FADD", "FMUL", "FFMA"), "fp32"),
    **dict.fromkeys(("F2F", "F2FP", "F2I", "I2F", "I2FP"), "convert"),
    "SHFL": "shuffle",
    **dict.fromkeys(("BAR", "SYNCS"), "barrier"),
}
"""The column of each opcode; other opcodes only count as instructions."""

_SHAPES = {
    "HMMA": {"16816": (16, 8, 16), "1688": (16, 8, 8), "1684": (16, 8, 4)},
    "IMMA": {"16832": (16, 8, 32), "16816": (16, 8, 16), "8816": (8, 8, 16)},
    "DMMA": {"884": (8, 8, 4), "1688": (16, 8, 8), "16816": (16, 8, 16)},
}
"""The sizes m, n, k of a warp's product, by opcode."""

_INSTRUCTION = re.compile(r"/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.a-z]*)([^;]*);")
_LABEL = re.compile(r"^(\.L_\w+):", re.MULTILINE)
_FUNCTION = re.compile(r"^\.text\.(\S+):", re.MULTILINE)


class Instruction(NamedTuple):
    address: int
    name: str
    """The opcode and its modifiers, such as LDG.E.128."""
    operands: str


@dataclass(frozen=True)
class Section:
    """Instructions of the whole kernel, or of one iteration of a loop."""

    first: int
    """The address of the first instruction, and of the last."""
    last: int
    instructions: int
    counts: dict[str, dict[str, int]]
    """Instruction counts by column and, within it, by kind."""
    tensor_flops: int
    """FLOPs of one warp: 2 m n k for each product, or a quarter if four warps share it."""
    depth: int = 0
    """The nesting depth: the number of enclosing loops, itself included."""

    def count(self, column: str) -> int:
        return sum(self.counts.get(column, {}).values())


@dataclass(frozen=True)
class MachineCode:
    """The counts of one kernel."""

    name: str
    target: str
    whole: Section
    loops: tuple[Section, ...]
    """The loops in the order of their first addresses."""


# ------------------------------------------------------------------------------------- reading


def read(name: str, target: str, disassembly: str, function: str = "") -> MachineCode:
    """The counts of one function in the output of nvdisasm; by default of its only function.

    Raises
    ------
    ValueError
        if the text has no such function.
    """
    text = _text_of(disassembly, function)
    instructions = list(_instructions(text))
    loops = _backward_branches(text, instructions)
    return MachineCode(
        name,
        target,
        _section(instructions),
        tuple(
            _section(
                [i for i in instructions if first <= i.address <= last],
                sum(f <= first and last <= end for f, end in loops),
            )
            for first, last in loops
        ),
    )


def _text_of(disassembly: str, function: str) -> str:
    parts = _FUNCTION.split(disassembly)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    if function in texts:
        return texts[function]
    if not function and len(texts) == 1:
        return next(iter(texts.values()))
    found = ", ".join(texts) or "none"
    raise ValueError(f"the disassembly has no function {function!r}; it has {found}")


def _instructions(text: str) -> Iterator[Instruction]:
    for match in _INSTRUCTION.finditer(text):
        yield Instruction(int(match[1], 16), match[2], match[3].strip())


def _backward_branches(text: str, instructions: Sequence[Instruction]) -> list[tuple[int, int]]:
    """The first and the last address of every loop."""
    addresses = {}
    for label in _LABEL.finditer(text):
        following = _INSTRUCTION.search(text, label.end())
        if following is not None:
            addresses[label[1]] = int(following[1], 16)
    loops: dict[int, int] = {}
    for instruction in instructions:
        target = re.search(r"\((\.L_\w+)\)", instruction.operands)
        if instruction.name.split(".")[0] != "BRA" or target is None:
            continue
        first = addresses[target[1]]
        # After the end of a kernel there is an instruction that branches to itself.
        if first < instruction.address:
            loops[first] = max(instruction.address, loops.get(first, 0))
    return sorted(loops.items())


def _section(instructions: Sequence[Instruction], depth: int = 0) -> Section:
    counts: dict[str, Counter[str]] = {}
    flops = 0
    for instruction in instructions:
        opcode, *modifiers = instruction.name.split(".")
        column = KINDS.get(opcode)
        # ptxas reads from address RZ to wait; it loads nothing.
        if column is None or instruction.operands.startswith("RZ, [RZ]"):
            continue
        counts.setdefault(column, Counter())[_kind(column, opcode, modifiers)] += 1
        if column == "tensor":
            flops += _flops(opcode, modifiers)
    first, last = (instructions[i].address if instructions else 0 for i in (0, -1))
    kinds = {column: dict(counts[column]) for column in COLUMNS if column in counts}
    return Section(first, last, len(instructions), kinds, flops, depth)


def _kind(column: str, opcode: str, modifiers: Sequence[str]) -> str:
    bits = next(
        (m for m in reversed(modifiers) if m in ("U8", "S8", "U16", "S16", "64", "128")), "32"
    )
    bits = bits.strip("US")
    if column in ("load", "store"):
        return bits
    if column == "tensor":
        return ".".join((opcode, *(m for m in modifiers if not m.startswith("gsb"))))
    if column == "special":
        return modifiers[0]
    if column in ("local", "shared") and not opcode.endswith("SM"):
        return f"{opcode}.{bits}"
    if opcode == "LDGSTS":
        return f"{opcode}.{bits}"
    if column == "convert":
        return ".".join((opcode, *(m for m in modifiers if re.fullmatch(r"[A-Z]+\d+", m))))
    return opcode


def _flops(opcode: str, modifiers: Sequence[str]) -> int:
    shape = modifiers[0] if modifiers else ""
    if match := re.fullmatch(r"(\d+)x(\d+)x(\d+)", shape):
        m, n, k = map(int, match.groups())
        return 2 * m * n * k // 4
    m, n, k = _SHAPES.get(opcode, {}).get(shape, (0, 0, 0))
    return 2 * m * n * k


# -------------------------------------------------------------------------------- disassembling


def disassembly_of(cubin: bytes) -> str:
    """The text of nvdisasm, with labels.

    Raises
    ------
    MissingToolError
        if Triton, which includes nvdisasm, is not installed.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_disassembler(), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def _disassembler() -> str:
    try:
        import triton.backends.nvidia
    except ImportError as error:
        raise MissingToolError(
            "nvdisasm is needed, and Triton, which includes it, is not installed: "
            "pip install 'precondattn[kernels]'"
        ) from error
    return str(Path(triton.backends.nvidia.__file__ or "").parent / "bin" / "nvdisasm")


def machine_code(variant: AnyVariant, target: str) -> MachineCode:
    """The counts of a variant of `triton_compiler` or `cuda_compiler` for a target such as "sm_90".

    Raises
    ------
    Exception
        of the compiler, if the variant does not compile.
    """
    if hasattr(variant, "name_expression"):
        from precondattn_kernel_tools import cuda_compiler

        compiled = cuda_compiler.compiled(variant, target)
        return read(variant.name, target, disassembly_of(compiled.cubin), compiled.lowered)
    from precondattn_kernel_tools import triton_compiler

    kernel = triton_compiler.compiled(variant, target)
    return read(variant.name, target, disassembly_of(kernel.asm["cubin"]), kernel.metadata.name)


# -------------------------------------------------------------------------------- command line


def table(codes: Iterable[MachineCode]) -> str:
    """A line for every kernel and each of its loops; empty columns are left out."""
    rows = []
    for code in codes:
        rows.append((f"{code.target}  {code.name}", code.whole))
        rows += [(f"{'    ' * loop.depth}loop {loop.first:#06x}", loop) for loop in code.loops]
    used = [column for column in COLUMNS if any(section.count(column) for _, section in rows)]
    cells = [["", "instructions", *used]]
    for name, section in rows:
        kinds = [section.counts.get(column, {}) for column in used]
        texts = (" ".join(f"{kind}:{n}" for kind, n in sorted(of.items())) for of in kinds)
        cells.append([name, str(section.instructions), *(text or "–" for text in texts)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def _named(module: str, name: str, target: str) -> MachineCode:
    """The counts of a variant by name, since kernels can not be pickled for other processes."""
    return machine_code(_variants_of(module, target)[name], target)


@functools.cache
def _variants_of(module: str, target: str) -> dict[str, AnyVariant]:
    return variants_of(module, target)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, read and print; returns 1 if a variant does not compile."""
    parser = argparse.ArgumentParser(description="Read the machine code of a package's kernels.")
    parser.add_argument("module", help="the module whose variants(target) are read")
    parser.add_argument("--target", action="append", default=[], choices=TARGETS, required=True)
    parser.add_argument("--match", default="", help="only variants whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="concurrent processes")
    parser.add_argument("--save", type=Path, help="a JSON file for all counts")
    given = parser.parse_args(arguments)
    if given.jobs < 1:
        parser.error(f"--jobs has to be at least 1, not {given.jobs}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: kernels would be interpreted, not compiled")
    pairs = selected(parser, given)
    context = multiprocessing.get_context("spawn")
    codes, failures = [], []
    with ProcessPoolExecutor(given.jobs, mp_context=context) as pool:
        tasks = [(v.name, t, pool.submit(_named, given.module, v.name, t)) for v, t in pairs]
        for name, target, task in tasks:
            try:
                codes.append(task.result())
            except Exception as error:  # A compiler error is a result, not a fault.
                failures.append(f"{target}  {name}\n    {type(error).__name__}: {error}")
    print(table(codes))
    print("\n".join(failures), end="\n" if failures else "")
    if given.save:
        saved = [asdict(code) for code in codes]
        given.save.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
