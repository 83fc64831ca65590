"""What `instructions.py` runs under valgrind: calls of some rows, each counted once.

`python -m precondattn_conformance.bench.count_instructions lucid path`
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch

from precondattn.arrays import Arrays
from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.computation import decode_run, ours
from precondattn_conformance.bench.correct import inputs_of
from precondattn_conformance.bench.instructions import cases
from precondattn_conformance.bench.paired import Run


def run_of(case: BenchCase) -> Run:
    """A warm call. That its result is correct is for the tests to say: the oracle is slow here."""
    mechanism, library = case.parsed, case.arrays
    inputs = inputs_of(case.mechanism, case.call_layout, case.dtype, case.library)
    arrays = {name: library.array(array, case.dtype) for name, array in inputs.items()}

    def with_gradient() -> Arrays:
        # The explicit pullback: autograd's first call imports PyTorch's compiler.
        out, pullback = mechanism.vjp(**arrays)
        gradients: Arrays = pullback(torch.ones_like(out))
        return gradients

    if case.work == "decode":
        decoder_of = ours(mechanism, None).decoder
        assert decoder_of is not None  # Ours has one.
        decoder = decoder_of(library, case.dtype, inputs)
        decoder.fill()
        run = decode_run(library, decoder)
    elif case.work == "forward_backward":
        run = Run(with_gradient)
    else:
        run = Run(lambda: mechanism(**arrays))
    run.reset()
    run.call()
    return run


def switch_on() -> None:
    """Let valgrind look at instructions from here on, and not at what is imported before."""
    command = ["callgrind_control", "--instr=on", str(os.getpid())]
    control = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while control.poll() is None:  # Valgrind answers only while this process runs.
        time.sleep(0.02)
    assert control.stdout is not None
    if control.returncode:
        raise RuntimeError(f"callgrind_control failed: {control.stdout.read()}")


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
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
