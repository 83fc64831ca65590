"""Estimated times of the calls of `alive`: start-up, inputs, oracle and compilation.

The seconds of inputs and oracle are measured by `make_estimates`, at a width of 128, and grow with
the width. Those of compilation are from the reports of the compilers, on one core without a cache.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from precondattn_gpu.shipped import ShippedCall

if TYPE_CHECKING:
    from precondattn.json_types import JsonObject

FILE = "estimates.json"
UNKNOWN = {"oracle": 4.0, "compilation": 10.0}
"""Default seconds for calls that are not in the file."""
MEASURED_WIDTH = 128
HEADLINE = {"forward": 9.0, "decode": 8.0}
"""Seconds of a headline benchmark, by the first kind of work in it. The calls are short; the time
goes to allocations, the reference on 1,024 tokens, and copies for the comparison."""
FLA = {"gated_delta": 68, "path": 39, "kda": 148, "gla": 278}
"""The number of configurations that flash-linear-attention tries at width 128, with gradient."""
COMPILED, TRIED = 0.9, 0.13
"""Seconds to compile a configuration of flash-linear-attention (measured on a CPU) and to time
it."""
RUN = 1.0
"""Seconds of the kernels and of copies to and from the device."""


def start_up(worker: str) -> float:
    """Seconds until a worker of a kind has imported its libraries and has set up the device."""
    seconds: float = _file()["start_up"].get(worker, 10.0)
    return seconds


def seconds(call: ShippedCall) -> float:
    """Seconds of a call in a running worker when all its kernels have to be compiled."""
    return oracle(call) + compilation(call) + RUN


def oracle(call: ShippedCall) -> float:
    """Seconds of inputs, oracle and comparison."""
    known = _file()["oracle"].get(named(call.expression, call.is_step), UNKNOWN["oracle"])
    return float(known) * max(call.d, call.e, MEASURED_WIDTH) / MEASURED_WIDTH


def compilation(call: ShippedCall) -> float:
    """Seconds of compilation of the kernels that no earlier call in the list has."""
    by_name: dict[str, float] = _file()["compilation"]
    return by_name.get(call.name, 0.0 if call.is_step else UNKNOWN["compilation"])


def named(expression: str, is_step: bool) -> str:
    """The name of a call without its widths, dtype and backend."""
    return f"{expression} step" if is_step else expression


@cache
def _file() -> JsonObject:
    content: JsonObject = json.loads(files("precondattn_gpu").joinpath(FILE).read_text())
    return content
