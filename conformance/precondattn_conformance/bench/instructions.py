"""How many instructions a call takes, counted by valgrind: the same next to any other process.

Two counts of the same code differ by less than a hundredth. A count says nothing of caches and
memory, but what makes a loop longer, or the calls around it, shows in it at once. Which kernels a
library chooses may depend on the processor's maker, so counts are compared on the same processor.
Calls take fifty times as long as without valgrind, and are small.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from precondattn.arrays import Arrays
from precondattn.json_types import JsonObject
from precondattn_conformance.bench import machine
from precondattn_conformance.bench.cases import COMPARED, BenchCase
from precondattn_conformance.bench.computation import CacheDecoder, decode_run
from precondattn_conformance.bench.correct import inputs_of
from precondattn_conformance.bench.paired import Run
from precondattn_conformance.writable import require_writable

FILE = Path(__file__).with_name("committed_instructions.json")

BLOCKED = (
    *("lucid", "lucid_backward", "laser_backward", "gated_delta_backward"),
    *("ccq_gated_delta", "path", "window_backward"),
)
"""Cases that spend their time in loops over blocks, counted at 256 tokens of two heads."""

SMALL = (
    *("overhead_softmax", "overhead_lucid", "overhead_ccq_gla"),
    *("overhead_gated_delta_decode", "overhead_lucid_decode"),
)
"""Cases that spend it around the arithmetic, counted for one call; caches have 64 tokens."""

ROWS = (*BLOCKED, *SMALL)
SLACK, SLACK_OF_SMALL = 0.015, 0.04
"""Small calls depend on the environment too: on paths, and on where Python keeps its objects."""
TIMEOUT = 900.0
COLOURS = {"worse": "red", "better": "green", "fine": "default", "new": "default"}


class CannotCountError(RuntimeError):
    """Valgrind did not count what was asked for."""


def cases(names: Iterable[str] = ()) -> list[BenchCase]:
    """The rows, or some of them, at the sizes in which they are counted."""
    wanted = tuple(names) or ROWS
    for name in wanted:
        if name not in ROWS:
            raise ValueError(f"{name!r} is no row of instructions; these are {', '.join(ROWS)}")
    counted = []
    for case in (case for case in COMPARED if case.name in wanted):
        layout = case.layout
        if case.name in BLOCKED:
            layout = layout._replace(t=256, s=256, h=2, n=2)
        elif case.work == "decode":
            layout = layout._replace(t=64, s=64)
        counted.append(replace(case, layout=layout, peers=(), calls=1))
    return counted


def missing() -> str:
    """Why nothing can be counted here; empty if it can."""
    programs = [name for name in ("valgrind", "callgrind_control") if shutil.which(name) is None]
    return f"{programs[0]} is not installed" if programs else ""


def counts(names: Iterable[str] = ()) -> dict[str, int]:
    """The instructions of one call of each row, in a process of its own."""
    rows = [case.name for case in cases(names)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts"
        # Counting is switched on in the process, when everything is imported and warm.
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"]
        command += ["--collect-atstart=no", "--instr-atstart=no", sys.executable, "-m"]
        command += ["precondattn_conformance.bench.instructions", *rows]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-20:]
            raise CannotCountError("\n".join([f"valgrind ended with {done.returncode}:", *last]))
        dumps = [out.with_name(f"counts.{i}") for i in range(1, len(rows) + 1)]
        texts = [dump.read_text(errors="replace") for dump in dumps]
    # The sum over all functions of each dump.
    totals = [re.search(r"^totals: ([1-9]\d*)", text, re.MULTILINE) for text in texts]
    if not all(totals):
        raise CannotCountError("valgrind counted nothing in a call")
    return {name: int(total[1]) for name, total in zip(rows, totals, strict=True) if total}


def kind() -> JsonObject:
    """What has to be equal so that counts are. A virtual machine may hide the processor's name."""
    described, info = machine.describe(), Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    names = ("cpu family", "model", "cache size")
    lines = [re.search(rf"^({name})\s*: (.*)$", text, re.MULTILINE) for name in names]
    return {
        "system": described["system"],
        "processor": described["processor"],
        "model": ", ".join(f"{line[1]} {line[2]}" for line in lines if line),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "versions": {name: described["versions"].get(name) for name in ("numpy", "torch")},
    }


def load(path: Path) -> list[JsonObject]:
    """The entries of a file, one for each kind; none if it does not exist."""
    try:
        entries: list[JsonObject] = json.loads(path.read_text(encoding="utf-8"))
        if any(set(entry) != {"kind", "date", "counts"} for entry in entries):
            raise TypeError
    except FileNotFoundError:
        return []
    except (TypeError, ValueError):
        raise ValueError(f"{path} has no counts of instructions") from None
    return entries


def _of_kind(path: Path, this: JsonObject) -> dict[str, int]:
    return next((entry["counts"] for entry in load(path) if entry["kind"] == this), {})


def verdict(name: str, share: float | None) -> str:
    """A row's count as a share of the committed one, in a word."""
    slack = 1 + (SLACK_OF_SMALL if name in SMALL else SLACK)
    if share is None:
        return "new"
    return "worse" if share > slack else "better" if share * slack < 1 else "fine"


def run(names: tuple[str, ...], save: Path | None, console: Console) -> int:
    """Count the rows and judge them, or write them to a file.

    The exit code is 1 if a count is worse than the committed one. Where valgrind is missing nothing
    is judged.
    """
    cases(names)  # Names are checked first.
    require_writable(save)
    if reason := missing():
        console.print(f"no instructions were counted: {reason}")
        return 0 if save is None else 1
    this = kind()
    committed, saved = _of_kind(FILE, this), _of_kind(save or FILE, this)
    if save is None and not committed:
        console.print("no committed counts for these versions: recorded only")
    counted = counts(names)
    table = Table("row", "instructions", "/ committed", "verdict", title="instructions")
    shares = {name: n / committed[name] for name, n in counted.items() if name in committed}
    verdicts = {name: verdict(name, shares.get(name)) for name in counted}
    for name, word in verdicts.items():
        text = f"{shares[name]:.3f}" if name in shares else "–"
        table.add_row(name, f"{counted[name]:,}", text, f"[{COLOURS[word]}]{word}[/]")
    console.print(table)
    console.print(
        f"worse is {SLACK:.1%} above the committed count, of small calls {SLACK_OF_SMALL:.0%}"
    )
    if save is None:
        return 1 if "worse" in verdicts.values() else 0
    entries = [entry for entry in load(save) if entry["kind"] != this]
    entries.append({"kind": this, "date": machine.now(), "counts": {**saved, **counted}})
    save.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    console.print(f"saved {len(counted)} counts to {save}", markup=False, soft_wrap=True)
    return 0


def _warm_run(case: BenchCase) -> Run:
    """A warm call. That its result is correct is for the tests to say: the oracle is slow here."""
    import torch

    mechanism, library = case.parsed, case.arrays
    inputs = inputs_of(case.mechanism, case.call_layout, case.dtype)
    arrays = {name: library.array(array, case.dtype) for name, array in inputs.items()}

    def with_gradient() -> Arrays:
        # The explicit pullback: autograd's first call imports PyTorch's compiler.
        out, pullback = mechanism.vjp(**arrays)
        gradients: Arrays = pullback(torch.ones_like(out))
        return gradients

    run = Run(with_gradient if case.work == "forward_backward" else lambda: mechanism(**arrays))
    if case.work == "decode":
        decoder = CacheDecoder(mechanism, None, library, case.dtype, inputs)
        decoder.fill()
        run = decode_run(library, decoder)
    run.reset()
    run.call()
    return run


def _switch_on() -> None:
    """Let valgrind look at instructions from here on, and not at what is imported before."""
    command = ["callgrind_control", "--instr=on", str(os.getpid())]
    control = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while control.poll() is None:  # Valgrind answers only while this process runs.
        time.sleep(0.02)
    assert control.stdout is not None
    if control.returncode:
        raise RuntimeError(f"callgrind_control failed: {control.stdout.read()}")


def main(names: list[str]) -> None:
    """What runs under valgrind: calls of some rows, each counted once."""
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    runs = [_warm_run(case) for case in cases(names)]
    _switch_on()
    for run in runs:
        run.reset()
        # Valgrind's requests, which PyTorch has compiled.
        torch._C._valgrind_toggle()
        run.call()
        torch._C._valgrind_toggle_and_dump_stats()


if __name__ == "__main__":
    main(sys.argv[1:])
