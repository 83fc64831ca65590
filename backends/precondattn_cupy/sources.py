"""The CUDA sources, with their includes expanded.

CuPy caches compiled code by its source text. An included header is not part of that text, so a
changed header would not be compiled.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

FOLDER = Path(__file__).with_name("cuda")
INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)


@functools.cache
def source(name: str) -> str:
    """The text of `name`.cu, with each header at its first include only."""
    return _written_out(f"{name}.cu", set())


def _written_out(file: str, included: set[str]) -> str:
    if file in included:
        return ""
    included.add(file)
    text = (FOLDER / file).read_text(encoding="utf-8").replace("#pragma once\n", "")
    return INCLUDE.sub(lambda result: _written_out(result[1], included), text)
