"""Measure on this CPU the times that `estimates` needs, and write its file.

    python -m precondattn_gpu.make_estimates docs/measurements/kernels

The folder contains the compilers' reports.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from precondattn_gpu import estimates, shipped
from precondattn_gpu.call import _compared
from precondattn_gpu.options import BACKENDS

if TYPE_CHECKING:
    from precondattn.json_types import JsonObject

IMPORTS = {
    "triton": "import torch, triton, precondattn_triton.variants",
    "pallas": "import jax, precondattn_pallas.variants; jax.numpy.zeros(1)",
    "cupy": "import numpy, precondattn_cupy.variants",
    "headline": "import torch, triton, precondattn_triton.variants",
}
"""Imports of the first task in each kind of worker."""
OF_A_DEVICE = 4.0
"""Seconds of a start that can not be measured on a CPU: the driver, a context, CUDA's libraries."""
REPORTS = {
    "triton": ("other_versions/triton_3_6.json", None),
    "pallas": ("other_versions/jax_0_11.json", None),
    "cupy": ("cuda.json", "sm_90"),
}
"""The compilers' report of each backend for the GPU machine's versions, and the target in it if it
has several."""


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m precondattn_gpu.make_estimates FOLDER")
    content = {
        "start_up": {kind: _start_up(code) for kind, code in IMPORTS.items()},
        "oracle": _oracle(),
        "compilation": _compilation(Path(sys.argv[1])),
    }
    path = Path(estimates.__file__).with_name(estimates.FILE)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(path)


def _start_up(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import precondattn_conformance; {code}"], check=True)
    return round(time.perf_counter() - start + OF_A_DEVICE, 2)


def _oracle() -> dict[str, float]:
    """Seconds of each expression: a call on the backend that computes by the definition."""
    seconds: dict[str, float] = {}
    for call in (each for backend in BACKENDS for each in shipped.calls(backend)):
        name = estimates.named(call.expression, call.is_step)
        if name in seconds:
            continue
        width = estimates.MEASURED_WIDTH
        given = Namespace(
            backend="portable", mechanism=call.expression, dtype="float32", d=width, e=width,
            tokens=call.tokens, step=call.is_step, library="numpy", device=None,
        )  # fmt: skip
        start = time.perf_counter()
        _compared(given)
        seconds[name] = round(time.perf_counter() - start, 2)
        print(f"{seconds[name]:6.2f} s  {name}", flush=True)
    return seconds


def _compilation(folder: Path) -> dict[str, float]:
    """Seconds of each call's kernels; a kernel is counted for the first call that has it."""
    by_call = defaultdict[str, float](float)
    for backend, (file, target) in REPORTS.items():
        for variant in json.loads((folder / file).read_text())["variants"]:
            if target in (None, variant["target"]) and (name := _call_of(backend, variant["name"])):
                by_call[name] += variant["seconds"]
    if not any(name.startswith("cupy") for name in by_call):
        by_call |= _of_cuda(json.loads((folder / REPORTS["cupy"][0]).read_text())["variants"])
    return {name: round(seconds, 1) for name, seconds in sorted(by_call.items())}


def _call_of(backend: str, variant: str) -> str:
    """The name of the call to which a variant's name belongs; empty for CUDA's template names."""
    found = re.match(r"(.+?) (step )?(bfloat16|float16|float32) (\d+(?:x\d+)?)( backward)?( |$)",
                     variant)  # fmt: skip
    if found is None:
        return ""
    step = " step" if found[2] else ""
    return f"{backend} {found[1]} {found[3]} {found[4]}{step}"


def _of_cuda(variants: list[JsonObject]) -> dict[str, float]:
    """Seconds of the kernels of each call of CuPy; a kernel counts for the first call that launches
    it."""
    from precondattn_cupy import variants as of_cupy

    left = {v["name"]: v["seconds"] for v in variants if v["target"] == "sm_90"}
    by_call = {}
    for call in shipped.calls("cupy"):
        launched = of_cupy.launches(call.mechanism, call.dtype, call.d, call.e, call.is_step)
        names = {launch.kernel for launch in launched}
        by_call[call.name] = sum(left.pop(name, 0.0) for name in names)
    return by_call


if __name__ == "__main__":
    main()
