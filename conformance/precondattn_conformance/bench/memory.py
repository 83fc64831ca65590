"""Peak memory of a call, measured in a process of its own.

    python -m precondattn_conformance.bench.memory '{"mechanism": "lucid", …}'

On a CPU it is the peak of the resident set during the call, less what was resident before it (the
interpreter, the libraries, a small call to warm up, and the inputs), plus the size of the inputs.
On a GPU it is what the library's allocator says. A process of its own, because a peak can only
rise, and because what one call leaves behind would hide what the next one needs.

JAX knows before the call: there it is what the compiler sets aside for inputs, results and all
between.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

import precondattn as pa
from precondattn_conformance import libraries
from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.computation import (
    backward_run,
    compiled_backward,
    compiled_forward,
    forward_run,
    ours,
)
from precondattn_conformance.bench.correct import inputs_of
from precondattn_conformance.inputs import Layout

WARM_TOKENS = 80
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
"""What an array took goes back to the system with it. By itself the C library raises this bound
as it sees larger arrays, and what their memory looks like afterwards differs from run to run."""

TIMEOUT = 1800
"""Seconds, after which a call counts as too much."""


class NoPeakError(RuntimeError):
    """A process that did not come back with a number."""


def peak_bytes(case: BenchCase, backend: str | None, device: str | None, multiple: int) -> float:
    """The peak of one call at a multiple of the case's tokens.

    Raises
    ------
    NoPeakError
        when the process fails, with the last line of what it said.
    """
    tokens = case.layout.t * multiple
    layout = case.layout._replace(t=tokens, s=tokens)
    asked = {**asdict(replace(case, layout=layout)), "backend": backend, "device": device}
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, json.dumps(asked)],
            env={**os.environ, **GIVES_BACK},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoPeakError(f"t={tokens} took more than {TIMEOUT} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise NoPeakError(f"t={tokens}: {said[-1]}")
    return float(done.stdout.strip().splitlines()[-1])


def main(text: str) -> None:
    """In the process of its own: print the peak, in bytes."""
    asked = json.loads(text)
    backend, device = asked.pop("backend"), asked.pop("device")
    layout = Layout(*asked.pop("layout"))
    case = BenchCase(**asked, layout=layout)
    library = libraries.named(case.library, device)
    with library.precision(case.dtype):
        if library.name == "jax":
            print(_set_aside(case, backend, library, layout))
            return
        warm = layout._replace(t=min(WARM_TOKENS, layout.t), s=min(WARM_TOKENS, layout.s))
        _prepared(case, backend, library, warm)[0]()
        call, size = _prepared(case, backend, library, layout)
        print(size + _peak_of(call, library))


def _prepared(case: BenchCase, backend: str | None, library: Any, layout: Layout) -> Any:
    """The call, and the size of its inputs in bytes."""
    of = ours(pa.parse(case.mechanism), backend)
    inputs, cotangent = _arrays(case, library, layout)
    arrays = [*inputs.values()]
    if case.work == "forward":
        call = forward_run(of, library, inputs).call
    else:
        call = backward_run(of, library, inputs, cotangent).call
        arrays.append(cotangent)
    return call, sum(int(array.nbytes) for array in arrays)


def _arrays(case: BenchCase, library: Any, layout: Layout) -> Any:
    """Inputs and a cotangent of the output."""
    m = pa.parse(case.mechanism)
    made = inputs_of.__wrapped__(case.mechanism, layout, case.dtype, case.library)
    inputs = {name: library.array(array, case.dtype) for name, array in made.items()}
    sizes = m.inputs.sizes(str(m), {name: array.shape for name, array in made.items()})
    shape = m.program.output.shape(sizes)
    return inputs, library.array(np.ones(shape, dtype=np.float32), case.dtype)


def _set_aside(case: BenchCase, backend: str | None, library: Any, layout: Layout) -> float:
    """What JAX's compiler sets aside for a call."""
    of = ours(pa.parse(case.mechanism), backend)
    inputs, cotangent = _arrays(case, library, layout)
    if case.work == "forward":
        lowered = compiled_forward(of).lower(inputs)
    else:
        lowered = compiled_backward(of).lower(inputs, cotangent)
    plan = lowered.compile().memory_analysis()
    return float(plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes)


def _peak_of(call: Any, library: Any) -> float:
    """How far a call's peak is above what was there before it."""
    if library.name == "torch" and str(library.device or "").startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return float(torch.cuda.max_memory_allocated() - before)
    give_back()
    _forget_peak()
    before = _resident("VmRSS")
    call()
    return max(_resident("VmHWM") - before, 0.0)


def give_back() -> None:
    """Have the allocator return what is free, so that a call can not use it unseen."""
    import gc

    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _forget_peak() -> None:
    """Have Linux count the peak from now on. Elsewhere it counts from the start."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _resident(field: str) -> float:
    """The resident set (`VmRSS`) or its peak (`VmHWM`), in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return 1024.0 * int(line.split()[1])
    import resource  # Windows has none.

    unit = 1 if sys.platform == "darwin" else 1024
    return float(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


if __name__ == "__main__":
    main(sys.argv[1])
