"""Configurations of the hottest kernels that may be faster than the default one.

`candidates.json` has them by kernel, by whether products have 16-bit factors, and by the padded
width. All compile for compute capability 9.0 without spilling, and fit its shared memory. Which one
is the fastest only a GPU shows (`conformance/gpu`).
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from precondattn_triton.configurations import Configuration


def candidates(kernel: str, width: int, half: bool = True) -> list[Configuration]:
    """The candidates of a kernel at a width, besides its default; empty where there are none."""
    by_width = _all().get(kernel, {}).get("half" if half else "full", {})
    return [Configuration(*numbers) for numbers in by_width.get(str(width), [])]


@cache
def _all() -> dict[str, dict[str, dict[str, list[list[int]]]]]:
    content: dict[str, dict[str, dict[str, list[list[int]]]]] = json.loads(
        files("precondattn_triton").joinpath("candidates.json").read_text(encoding="utf-8")
    )
    return content
