"""How long a call of `alive` takes: start-up, inputs and oracle as measured on a CPU, compilation.

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
"""Seconds of calls that the file does not have."""
MEASURED_WIDTH = 128
HEADLINE = {"forward": 9.0, "decode": 8.0}
"""Seconds of a headline by its first work. The calls are short: the time is that of allocations, of
the definition on 1,024 tokens, and of copies for the comparison."""
FLA = {"gated_delta": 68, "path": 39, "kda": 148, "gla": 278}
"""How many configurations flash-linear-attention tries at width 128, gradient included."""
COMPILED, TRIED = 0.9, 0.13
"""Seconds to compile a configuration of it, as measured on a CPU, and to time one."""
RUN = 1.0
"""Seconds of the kernels, and of copies to and from the device."""


def start_up(worker: str) -> float:
    """Seconds until a worker of a kind has imported its libraries and has set up the device."""
    seconds: float = _file()["start_up"].get(worker, 10.0)
    return seconds


def seconds(call: ShippedCall) -> float:
    """Seconds of a call in a worker that runs already, with all of its kernels to be compiled."""
    return oracle(call) + compilation(call) + RUN


def oracle(call: ShippedCall) -> float:
    """Seconds of inputs, oracle and comparison."""
    known = _file()["oracle"].get(named(call.expression, call.is_step), UNKNOWN["oracle"])
    return float(known) * max(call.d, call.e, MEASURED_WIDTH) / MEASURED_WIDTH


def compilation(call: ShippedCall) -> float:
    """Seconds of the compilers, for kernels that no call before it in the list has."""
    by_name: dict[str, float] = _file()["compilation"]
    return by_name.get(call.name, 0.0 if call.is_step else UNKNOWN["compilation"])


def named(expression: str, is_step: bool) -> str:
    """The name of a call whatever its widths, dtype and backend."""
    return f"{expression} step" if is_step else expression


@cache
def _file() -> JsonObject:
    content: JsonObject = json.loads(files("precondattn_gpu").joinpath(FILE).read_text())
    return content
