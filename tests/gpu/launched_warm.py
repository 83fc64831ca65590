"""Prints the differences between the kernels compiled for calls and those that the calls launch.

The calls are made as on a GPU, with tensors on a CPU, and their launches are recorded and not run.
"""

import argparse
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from precondattn.execution import preparation
from precondattn_conformance import runner
from precondattn_conformance.status import PASSED
from precondattn_gpu import call as of_gpu
from precondattn_gpu import shipped, warm_calls
from precondattn_kernel_tools.triton_launches import TritonLaunch, recorded
from precondattn_triton import backend
from precondattn_triton.target import compiling_for

CALLS = (
    shipped.ShippedCall("triton", "gla", "bfloat16", 64, 64),
    shipped.ShippedCall("triton", "lucid_solve", "float32", 64, 64),
    shipped.ShippedCall(
        "triton", "windowed[size=7,shift=3,grid=64/64,bias=true]", "float16", 32, 32
    ),
    shipped.ShippedCall("triton", "path[flush=64]", "bfloat16", 64, 64, is_step=True),
    shipped.ShippedCall("triton", "gated_delta", "bfloat16", 64, 64, is_step=True),
)


def kernels(launches: list[TritonLaunch]) -> set[str]:
    """The kernels that Triton compiles for launches."""
    variants = [launch.variant(launch.function.module) for launch in launches]
    return {
        f"{v.name} {sorted(v.signature.items())} {sorted(v.constants.items(), key=str)} "
        f"{sorted(v.options.items())} {sorted(v.divisible)}"
        for v in variants
    }


def of_call(call: shipped.ShippedCall) -> set[str]:
    """The kernels of a call of the stage `alive`."""
    given = argparse.Namespace(
        backend="triton", mechanism=call.expression, dtype=call.dtype, d=call.d, e=call.e,
        tokens=call.tokens, step=call.is_step, library="torch", device=None,
    )  # fmt: skip
    run_case = runner.run_case

    def passed(*given: Any) -> Any:
        """Return a passing outcome, so that the next check of the call runs too."""
        return replace(run_case(*given), status=PASSED)

    with (
        patch.object(runner, "run_case", passed),
        patch.object(preparation, "READ_AT_ONCE", ()),
        patch.object(backend, "is_interpreting", lambda: True),
        patch.object(backend, "_interpreted", nullcontext),
        compiling_for(warm_calls.TARGET),
        recorded() as launches,
    ):
        of_gpu._compared(given)
    return kernels(launches)


def of_warm(call: shipped.ShippedCall) -> set[str]:
    """The kernels that are compiled beforehand for a call."""
    with warm_calls.as_on_a_gpu(), recorded() as launches:
        warm_calls.run(warm_calls.of_alive(call))
    return kernels(launches)


def main() -> None:
    count, different = 0, []
    for call in CALLS:
        launched, compiled = of_call(call), of_warm(call)
        count += len(launched)
        different += sorted(launched ^ compiled)
    print(count, "kernels, different:", different)


if __name__ == "__main__":
    main()
