"""What `instructions.py` runs under valgrind: calls of some rows, each counted once.

`python -m precondattn_conformance.bench.count_instructions lucid path`
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch

import precondattn as pa
from precondattn_conformance import libraries
from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.computation import (
    backward_run,
    decode_run,
    forward_run,
    ours,
)
from precondattn_conformance.bench.correct import inputs_of
from precondattn_conformance.bench.instructions import cases
from precondattn_conformance.bench.paired import Run


def run_of(case: BenchCase) -> Run:
    """A warm call. That its result is correct is for the tests to say: the oracle is slow here."""
    library, of = libraries.named(case.library, None), ours(pa.parse(case.mechanism), None)
    more = 1 if case.work == "decode" else 0
    layout = case.layout._replace(t=case.layout.t + more, s=case.layout.s + more)
    inputs = inputs_of(case.mechanism, layout, case.dtype, case.library)
    if case.work == "decode":
        assert of.decoder is not None  # As ours has.
        decoder = of.decoder(library, case.dtype, inputs)
        decoder.fill()
        run = decode_run(library, decoder)
    else:
        arrays = {name: library.array(array, case.dtype) for name, array in inputs.items()}
        run = forward_run(of, library, arrays)
        if case.work == "forward_backward":
            cotangent = torch.ones_like(run.call()["the output"])
            run = backward_run(of, library, arrays, cotangent)
    for _ in range(2):
        run.reset()
        run.call()
    return run


def switch_on() -> None:
    """Let valgrind look at instructions from here on: what came before is ten times as fast."""
    control = subprocess.Popen(
        ["callgrind_control", "--instr=on", str(os.getpid())],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # Valgrind answers only while this process runs.
    while control.poll() is None:
        time.sleep(0.02)
    assert control.stdout is not None
    if control.returncode:
        raise RuntimeError(f"callgrind_control failed: {control.stdout.read()}")


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    runs = [run_of(case) for case in cases(names)]
    switch_on()
    for run in runs:
        run.reset()
        # Valgrind's requests, which PyTorch has compiled.
        torch._C._valgrind_toggle()
        run.call()
        torch._C._valgrind_toggle_and_dump_stats()


if __name__ == "__main__":
    main(sys.argv[1:])
