"""The CUDA sources, with what they include written out.

CuPy keeps what it has compiled by the text that it was given. What stands in a header of ours
would not be part of that text, and a change of it would go unnoticed.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

FOLDER = Path(__file__).with_name("cuda")
INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)


@functools.cache
def source(name: str) -> str:
    """The text of `name`.cu, each header once, where it is first asked for."""
    return _written_out(f"{name}.cu", set())


def _written_out(file: str, seen: set[str]) -> str:
    if file in seen:
        return ""
    seen.add(file)
    text = (FOLDER / file).read_text(encoding="utf-8").replace("#pragma once\n", "")
    return INCLUDE.sub(lambda found: _written_out(found[1], seen), text)
