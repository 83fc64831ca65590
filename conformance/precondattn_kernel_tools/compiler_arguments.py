"""The command line that the ahead-of-time compilers have in common."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path


def parsed(
    of: str, targets: Iterable[str], example: str, arguments: Sequence[str] | None
) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The parser, for errors to come, and what was given to compile kernels of this kind."""
    parser = argparse.ArgumentParser(description=f"Compile a package's {of} kernels.")
    parser.add_argument("module", help="the module whose variants(target) are compiled")
    parser.add_argument("--target", action="append", default=[], choices=tuple(targets))
    parser.add_argument("--match", default="", help="only variants whose name has this in it")
    parser.add_argument("--list", action="store_true", help="the variants' names, and no more")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--save", type=Path, help="a JSON file for the report")
    given = parser.parse_args(arguments)
    if given.jobs < 1:
        parser.error(f"--jobs has to be at least 1, not {given.jobs}")
    if not given.target:
        parser.error(f"--target is needed: {example} …")
    return parser, given
