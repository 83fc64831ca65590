"""All candidate configurations of one Triton kernel at one width, tried in this process.

    python -m precondattn_gpu.tune KERNEL WIDTH --device cuda --result FILE

The whole call is timed with each candidate in turn with the default configuration, so that only the
kernel differs. A candidate whose results differ from the default's is not timed. On a CPU nothing
is timed; each candidate is compiled for compute capability 9.0.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from precondattn_gpu.options import CPU

if TYPE_CHECKING:
    import torch

    from precondattn.json_types import Json, JsonObject
    from precondattn_kernel_tools.triton_launches import TritonLaunch
    from precondattn_triton.configurations import Configuration

CALLS = {
    "lucid_inverse": ("lucid_solve", "forward"),
    "lucid_update": ("lucid_solve", "forward"),
    "lucid_gradient": ("lucid_solve", "forward_backward"),
    "laser_forward": ("laser", "forward"),
    "laser_query_gradient": ("laser", "forward_backward"),
    "laser_key_gradient": ("laser", "forward_backward"),
    "chunk_states": ("gated_delta", "forward"),
    "chunk_reads": ("gated_delta", "forward"),
    "delta_prepare": ("gated_delta", "forward"),
    "chunk_gradients": ("gated_delta", "forward_backward"),
    "path_forward": ("path", "forward"),
    "path_query_gradient": ("path", "forward_backward"),
    "path_key_gradient": ("path", "forward_backward"),
}
"""The call in which each kernel is timed."""

TARGET = "sm_90"
DTYPE = "bfloat16"
BATCH, TOKENS, HEADS = 2, 8192, 16
ROUNDS = 3
GAIN = 0.02
"""A winner is faster by more than this share, and by more than the variation of the default."""
SAME = 2e-2
"""The largest allowed difference of results, relative to the largest element."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the candidates of one kernel.")
    parser.add_argument("kernel", choices=sorted(CALLS))
    parser.add_argument("width", type=int)
    parser.add_argument("--device", required=True)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    tried = compiled if given.device == CPU else timed
    given.result.write_text(json.dumps(tried(given.kernel, given.width, given.device)))


def compiled(kernel: str, width: int, device: str) -> JsonObject:
    """The resources of each candidate, for compute capability 9.0."""
    from precondattn_triton.candidates import candidates

    tried = [
        {"configuration": list(candidate), "failures": _failures(kernel, width, candidate)}
        for candidate in candidates(kernel, width)
    ]
    failed = sum(bool(each["failures"]) for each in tried)
    return {
        "status": "failed" if failed else "passed",
        "message": f"{len(tried) - failed} of {len(tried)} candidates fit {TARGET}",
        "kernel": kernel,
        "width": width,
        "candidates": tried,
        "winner": None,
    }


def _failures(kernel: str, width: int, candidate: Configuration) -> list[str]:
    """Compiler failures of the launches that a candidate changes."""
    import torch

    from precondattn_kernel_tools.triton_compiler import compile_variant
    from precondattn_triton.configurations import forced
    from precondattn_triton.target import compiling_for
    from precondattn_triton.variants import launches

    call = (CALLS[kernel][0], torch.bfloat16, width, width)
    with compiling_for(TARGET):
        by_default = {_identity(launch) for launch in launches(*call)}
        with forced(**{kernel: candidate}):
            changed = {_identity(launch): launch for launch in launches(*call)}
        return [
            failure
            for identity, launch in changed.items()
            if identity not in by_default
            for failure in compile_variant(launch.variant(kernel), TARGET).failures
        ]


def timed(kernel: str, width: int, device: str) -> JsonObject:
    """The time of the call with each candidate, and the winner if one is faster."""
    import torch
    from triton import testing

    from precondattn_conformance.inputs import CallLayout
    from precondattn_gpu.workload import workload
    from precondattn_triton.candidates import candidates
    from precondattn_triton.configurations import configuration, forced

    mechanism, work = CALLS[kernel]
    layout = CallLayout(
        "tuning", b=BATCH, t=TOKENS, s=TOKENS, h=HEADS, n=HEADS,
        d=width, e=width, values_per_head=1,
    )  # fmt: skip
    call = workload(mechanism, work, layout, DTYPE, device)
    # If there is already a tuned file for this device, its configuration is the default.
    default = configuration(kernel, width, True, torch.empty(0, device=device))
    expected = call()

    def milliseconds(configuration: Configuration) -> float:
        with forced(**{kernel: configuration}):
            return float(testing.do_bench(call, warmup=20, rep=60, return_mode="median"))

    tried: list[JsonObject] = []
    of_default = [milliseconds(default)]
    for candidate in candidates(kernel, width):
        entry: JsonObject = {"configuration": list(candidate)}
        tried.append(entry)
        try:
            with forced(**{kernel: candidate}):
                entry["difference"] = _difference(call(), expected)
            if not entry["difference"] <= SAME:
                entry["failures"] = ["its results differ from the default's"]
                continue
            entry["ms"] = statistics.median(milliseconds(candidate) for _ in range(ROUNDS))
        except Exception as error:  # An error is a result too.
            entry["failures"] = [f"{type(error).__name__}: {error}"]
        of_default.append(milliseconds(default))
    message, winner = _winner(tried, of_default)
    return {
        "status": "passed",
        "message": message,
        "kernel": kernel,
        "width": width,
        "default": {"configuration": list(default), "ms": of_default},
        "candidates": tried,
        "winner": winner,
    }


def _winner(tried: list[JsonObject], of_default: list[float]) -> tuple[str, Json]:
    default, noise = statistics.median(of_default), max(of_default) - min(of_default)
    fastest = min((each for each in tried if "ms" in each), key=lambda e: e["ms"], default=None)
    if fastest is None:
        return "no candidate ran", None
    gained = default - fastest["ms"]
    text = (
        f"default {default:.3f} ms (± {noise / 2:.3f}), "
        f"best {fastest['configuration']} {fastest['ms']:.3f} ms"
    )
    return text, fastest["configuration"] if gained > max(noise, GAIN * default) else None


def _difference(results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest element; NaN if a result contains NaN."""
    import torch

    worst = 0.0
    for name, array in expected.items():
        size = float(array.abs().max()) or 1.0
        difference = (results[name].float() - array.float()).abs().max() / size
        worst = float(torch.maximum(torch.tensor(worst), difference.cpu()))
    return worst


def _identity(launch: TritonLaunch) -> tuple[object, ...]:
    """The compile-time parameters of a launch, without types."""
    constants = tuple(
        (p.name, launch.arguments[p.name]) for p in launch.function.params if p.is_constexpr
    )
    return launch.function.__name__, constants, tuple(sorted(launch.options.items()))


if __name__ == "__main__":
    main()
