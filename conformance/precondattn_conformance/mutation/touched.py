"""The lines of files that a call executes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import TraceFunction


@contextmanager
def touched(files: Container[str]) -> Iterator[set[tuple[str, int]]]:
    """Context with a set that collects the file and number of each line that is executed."""
    lines: set[tuple[str, int]] = set()

    def of_line(frame: FrameType, event: str, argument: object) -> TraceFunction:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return of_line

    def of_call(frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        if frame.f_code.co_filename not in files:
            return None
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return of_line

    before = sys.gettrace()
    sys.settrace(of_call)
    threading.settrace(of_call)
    try:
        yield lines
    finally:
        sys.settrace(before)
        threading.settrace(None)
