"""One call of a backend in this process, with named launches, compared with the oracle.

    python -m precondattn_gpu.call BACKEND MECHANISM DTYPE D E TOKENS --result FILE [--step]

Every launch is a line of the output, written before the kernel runs. If a kernel stops the process,
the last of these lines names it.
"""

from __future__ import annotations

import argparse
import json
import os
import traceback
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from precondattn.backend import UnsupportedError
from precondattn_gpu.options import HELPER
from precondattn_gpu.shown import entries_of, plan_of_call

if TYPE_CHECKING:
    from precondattn.json_types import JsonObject
    from precondattn_conformance.inputs import CallLayout
    from precondattn_conformance.libraries import Library

LAUNCH = "launch "
"""The prefix of an output line that names a launch."""
LEDGER = "ledger "
"""The prefix of an output line with the ledger entries that the call is to show."""

NO_POOL = "PRECONDATTN_GPU_NO_POOL"
"""Environment variable: CuPy allocates each array from the driver, not from its memory pool."""

BATCH, HEADS, KEY_HEADS = 2, 4, 2


def main() -> None:
    parser = argparse.ArgumentParser(description="One call of a backend, compared with the oracle.")
    for name in ("backend", "mechanism", "dtype"):
        parser.add_argument(name)
    for name in ("d", "e", "tokens"):
        parser.add_argument(name, type=int)
    parser.add_argument("--step", action="store_true", help="one token after a cache of the others")
    parser.add_argument("--library", required=True)
    parser.add_argument("--device")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    launched = _named_launches(options.backend)
    try:
        result = _compared(options)
    except Exception as error:  # The message is the result.
        result = {"status": "failed", "message": f"{type(error).__name__}: {error}"}
        traceback.print_exc()
    result["kernels"] = list(dict.fromkeys(launched))
    options.result.write_text(json.dumps(result))
    if result["status"] not in ("passed", "unsupported"):
        # Memory and the device may be in a bad state, so the worker ends.
        raise SystemExit(1)


def layout_of(d: int, e: int, tokens: int) -> CallLayout:
    """The sizes of a call."""
    from precondattn_conformance.inputs import CallLayout

    return CallLayout(
        "call", b=BATCH, t=tokens, s=tokens, h=HEADS, n=KEY_HEADS,
        d=d, e=e, m=64, values_per_head=1,
    )  # fmt: skip


def _compared(options: argparse.Namespace) -> JsonObject:
    from precondattn_conformance import libraries

    layout = layout_of(options.d, options.e, options.tokens)
    library = libraries.named(options.library, options.device)
    # JAX looks for its devices when an array is made; until then, kernels would be interpreted.
    library.array(np.zeros(1), "float32")
    if options.backend == "cupy":
        _prepare_cupy(options.library)
    if not options.step:
        return _compared_call(options, layout)
    with library.precision(options.dtype):
        return _compared_step(options, layout, library)


def _prepare_cupy(library: str) -> None:
    """Register bfloat16 with NumPy, and turn off CuPy's memory pool if `NO_POOL` is set."""
    import ml_dtypes  # noqa: F401  NumPy knows bfloat16 from it.

    if library == "cupy" and os.environ.get(NO_POOL):
        import cupy

        cupy.cuda.set_allocator(None)


def _compared_call(options: argparse.Namespace, layout: CallLayout) -> JsonObject:
    """Compare gradients and output with the oracle."""
    from precondattn_conformance.case import Case
    from precondattn_conformance.runner import run_case

    # Around LUCID's solve, the gradients of clustered keys cancel between pieces, where they are
    # rounded to 16 bits.
    kind = "random" if options.mechanism.startswith("lucid[") else "clustered"
    backends = backends_of(options.backend, options.mechanism)
    try:
        plan = plan_of_call(
            options.mechanism, backends, options.library, layout, options.dtype, options.device
        )
    except UnsupportedError as reason:
        return {"status": "unsupported", "message": str(reason)}
    _announce(entries_of(plan, options.backend, layout, ("forward", "vjp")))
    result: JsonObject = {}
    for check in ("outputs", "gradients"):
        case = Case(check, options.mechanism, options.library, options.dtype, layout, kind)
        outcome = run_case(case, backends, options.device)
        status = outcome.status
        if status == "failed" and outcome.measured is not None:
            status = "wrong"
        # The snippet that reproduces a failure names a layout of the suite, which this is not.
        message = f"{outcome.reason}\n\n{outcome.details}".strip()
        result = {"status": status, "message": f"{check}: {message}" if message else ""}
        result |= vars(outcome.measured) if outcome.measured else {}
        if status != "passed":
            return result
    return result


def _announce(entries: list[JsonObject]) -> None:
    """Print the ledger entries before a kernel runs; they count against it if it crashes."""
    print(f"{LEDGER}{json.dumps(entries)}", flush=True)


def backends_of(backend: str, mechanism: str) -> tuple[str, ...]:
    """The backends of a call: the backend, and a helper for pieces around LUCID's solve."""
    if mechanism.startswith("lucid["):
        return _with_helper(backend)
    return (backend,)


def _with_helper(backend: str) -> tuple[str, ...]:
    """A backend and, for one with kernels, the backend that computes what the kernels do not."""
    return (backend, HELPER[backend]) if backend in HELPER else (backend,)


def _compared_step(options: argparse.Namespace, layout: CallLayout, library: Library) -> JsonObject:
    """Compare one token after a cache. The helper backend fills the cache where there is no
    kernel."""
    import precondattn as pa
    from precondattn_conformance.bench.computation import decode_run, ours
    from precondattn_conformance.bench.correct import (
        UncheckedError,
        WrongResultError,
        check_decode,
        inputs_of,
    )

    mechanism = pa.parse(options.mechanism)
    of = ours(mechanism, ",".join(_with_helper(options.backend)))
    inputs = inputs_of(str(mechanism), layout, options.dtype)
    assert of.decoder is not None
    decoder = of.decoder(library, options.dtype, inputs)
    explanation = decoder.explain()
    if options.backend not in explanation.backends:
        message = f"the step has no kernel of {options.backend}:\n{explanation}"
        return {"status": "unsupported", "message": message}
    _announce(entries_of(explanation, options.backend, layout, ("extend",)))
    try:
        decoder.fill()
        run = decode_run(library, decoder)
        checked = check_decode(of, layout, decoder, run)
    except (UnsupportedError, UncheckedError) as reason:
        return {"status": "unsupported", "message": str(reason)}
    except WrongResultError as wrong:
        return {"status": "wrong", "message": str(wrong), "error": wrong.error}
    return {"status": "passed", "error": checked.error, "bound": checked.bound}


_launched: list[str] = []
"""The names of the kernels that the current call has launched."""


def _named_launches(backend: str) -> list[str]:
    """The names of the kernels that are launched from now on; each is printed before it runs."""
    _launched.clear()
    _watch(backend)
    return _launched


def _note(name: str) -> None:
    _launched.append(name)
    print(f"{LAUNCH}{name}", flush=True)


@cache
def _watch(backend: str) -> None:
    """Note every launch of a backend; once in a process."""
    if backend == "triton":
        _watch_triton()
    elif backend == "cupy":
        _watch_cupy()
    elif backend == "pallas":
        _watch_pallas()


def _watch_triton() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return  # The interpreter does not launch.
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    @wraps(run)
    def noted(self: JITFunction, *args: object, **named: object) -> object:
        _note(self.__name__)
        return run(self, *args, **named)

    JITFunction.run = noted


def _watch_cupy() -> None:
    from precondattn_cupy import launch

    for name in ("_compiled", "_simulated"):
        function = getattr(launch, name)

        def noted(
            file: str, kernel: str, *more: object, function: Callable[..., object] = function
        ) -> object:
            _note(kernel)
            return function(file, kernel, *more)

        setattr(launch, name, noted)


def _watch_pallas() -> None:
    """Kernels are named when they are traced. That is not when they run, so nothing is printed."""
    from jax.experimental import pallas

    pallas_call = pallas.pallas_call

    def noted(kernel: Callable[..., object], *args: object, **named: object) -> object:
        _launched.append(getattr(kernel, "func", kernel).__name__)
        return pallas_call(kernel, *args, **named)

    pallas.pallas_call = noted


if __name__ == "__main__":
    main()
