"""The peak memory of a call, measured in a separate process, and the memory of a process.

    python -m precondattn_conformance.memory '{"mechanism": "lucid", …}'

On a CPU the peak is the largest resident set during the call, minus the resident set before it
(interpreter, libraries, a small warm-up call, and the inputs), plus the size of the inputs. On a
GPU it is the peak reported by the library's allocator. Each call has a separate process, because
the resident set's peak never falls, and because memory left by one call would hide the need of the
next.

JAX's compiler knows the peak before the call: it is the memory planned for inputs, results and
temporary arrays.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import precondattn as pa
from precondattn.arrays import Array, Arrays
from precondattn_conformance import libraries
from precondattn_conformance.harmless_keys import with_harmless_keys
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_conformance.libraries import Library

WARM_TOKENS = 80
MALLOC_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
"""Environment variables that make the C library return freed arrays to the system at once.
Otherwise it raises this threshold when it sees larger arrays, and the resident set differs from run
to run."""

TIMEOUT = 1800
"""Seconds after which a call counts as too expensive."""


class NoPeakError(RuntimeError):
    """Raised if a process ended without printing a peak."""


@dataclass(frozen=True)
class MeasuredCall:
    """A call whose peak memory is measured: forward, or forward and backward."""

    mechanism: str
    layout: CallLayout
    library: str
    dtype: str
    has_backward: bool = True
    backend: str | None = None
    """One backend name, or several separated by commas in order of preference."""
    device: str | None = None


def peak_bytes(call: MeasuredCall) -> float:
    """The peak of a call, in bytes.

    Raises
    ------
    NoPeakError
        if the process fails, with the last line of its error output.
    """
    tokens = call.layout.t
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, json.dumps(asdict(call))],
            env={**os.environ, **MALLOC_SETTINGS},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoPeakError(f"t={tokens} took more than {TIMEOUT} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise NoPeakError(f"t={tokens}: {lines[-1]}")
    return float(done.stdout.strip().splitlines()[-1])


def main(text: str) -> None:
    """Print the peak in bytes; runs in the process of the call."""
    fields = json.loads(text)
    layout = CallLayout(*fields.pop("layout"))
    call = MeasuredCall(layout=layout, **fields)
    library = libraries.named(call.library, call.device)
    with library.precision(call.dtype):
        if library.name == "jax":
            print(_planned_by_jax(call, library))
            return
        warm = layout._replace(t=min(WARM_TOKENS, layout.t), s=min(WARM_TOKENS, layout.s))
        _prepared(call, library, warm)[0]()
        run, size = _prepared(call, library, layout)
        print(size + peak_of(run, library))


def _forward(call: MeasuredCall, arrays: Arrays) -> Callable[[Arrays], Array]:
    """The function from the inputs to the output, with the masks of the call."""
    mechanism = pa.parse(call.mechanism)
    backend = None if call.backend is None else tuple(call.backend.split(","))
    return lambda inputs: mechanism(**inputs, **arrays, backend=backend)


def _prepared(
    call: MeasuredCall, library: Library, layout: CallLayout
) -> tuple[Callable[[], object], int]:
    """A function that runs the call, and the size of its inputs in bytes."""
    inputs, cotangent = _arrays(call, library, layout)
    arrays = _masks(library, layout)
    forward = _forward(call, arrays)
    size = sum(int(array.nbytes) for array in (*inputs.values(), *arrays.values()))
    if not call.has_backward:
        return lambda: forward(inputs), size

    def both() -> object:
        gradients = library.gradients(forward, inputs, cotangent)
        if gradients is not None:
            return gradients
        backend = None if call.backend is None else tuple(call.backend.split(","))
        out, pullback = pa.parse(call.mechanism).vjp(**inputs, **arrays, backend=backend)
        return out, pullback(cotangent)

    return both, size + int(cotangent.nbytes)


def _arrays(call: MeasuredCall, library: Library, layout: CallLayout) -> tuple[Arrays, Array]:
    """The inputs, and a cotangent of the output."""
    m = pa.parse(call.mechanism)
    arrays = with_harmless_keys(m, make_inputs(m, layout, "clustered"))
    inputs = {name: library.array(array, call.dtype) for name, array in arrays.items()}
    sizes = m.inputs.sizes(str(m), {name: array.shape for name, array in arrays.items()})
    shape = m.program.output.shape(sizes)
    return inputs, library.array(np.ones(shape, dtype=np.float32), call.dtype)


def _masks(library: Library, layout: CallLayout) -> Arrays:
    """The masks of the layout, as arrays of the library."""
    return {name: library.array(array) for name, array in layout.masks().items()}


def _planned_by_jax(call: MeasuredCall, library: Library) -> float:
    """The memory that JAX's compiler plans for a call."""
    import jax

    inputs, cotangent = _arrays(call, library, call.layout)
    forward = _forward(call, _masks(library, call.layout))

    def both(x: Arrays, cotangent: Array) -> object:
        out, pullback = jax.vjp(forward, x)
        return out, pullback(cotangent)[0]

    if call.has_backward:
        lowered = jax.jit(both).lower(inputs, cotangent)
    else:
        lowered = jax.jit(forward).lower(inputs)
    plan = lowered.compile().memory_analysis()
    return float(plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes)


def _is_on_gpu_of_torch(library: Library) -> bool:
    return library.name == "torch" and str(library.device or "").startswith("cuda")


def peak_of(run: Callable[[], object], library: Library) -> float:
    """The amount by which peak memory during a run exceeds the memory in use before it."""
    if _is_on_gpu_of_torch(library):
        import torch

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return float(torch.cuda.max_memory_allocated() - before)
    release_free_memory()
    _reset_peak()
    before = _resident("VmRSS")
    run()
    return max(_resident("VmHWM") - before, 0.0)


def held_bytes(library: Library) -> int:
    """The memory in use: of PyTorch's allocator on a GPU, else of the process; 0 if unknown.

    Of a process only its own memory counts, also where it is swapped out. Pages of the files that
    it has mapped do not: the system drops those of libraries when memory is short, which would hide
    a leak.
    """
    release_free_memory()
    if _is_on_gpu_of_torch(library):
        import torch

        return int(torch.cuda.memory_allocated())
    mapped = Path("/proc/self/smaps_rollup")
    if not mapped.exists():
        return 0
    sizes = _kibibytes(mapped)
    return 1024 * (sizes["Anonymous"] + sizes["Swap"])


def release_free_memory() -> None:
    """Make the allocator return free memory, so that the next call can not use it unnoticed."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _reset_peak() -> None:
    """Measure the peak from now on, on Linux. Other systems measure it from the start."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _resident(field: str) -> float:
    """The resident set (`VmRSS`) or its peak (`VmHWM`), in bytes."""
    status = Path("/proc/self/status")
    sizes = _kibibytes(status) if status.exists() else {}
    if field in sizes:
        return 1024.0 * sizes[field]
    import resource  # Windows lacks this module.

    unit = 1 if sys.platform == "darwin" else 1024
    return float(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _kibibytes(path: Path) -> dict[str, int]:
    """The sizes that a file of /proc has, by their names."""
    words = [line.split() for line in path.read_text().splitlines()]
    return {each[0].rstrip(":"): int(each[1]) for each in words if each[2:] == ["kB"]}


if __name__ == "__main__":
    main(sys.argv[1])
