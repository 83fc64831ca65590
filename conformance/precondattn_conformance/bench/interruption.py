"""Ctrl-C in a run of benchmarks, which ends the run wherever it is noticed.

Python raises `KeyboardInterrupt` between any two instructions. Libraries may turn it into another
error, and Python drops it within a callback of a weak reference. So it is also remembered.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from types import FrameType


class Interruption:
    """Whether Ctrl-C was pressed since it was entered."""

    is_here = False
    _is_watched = False

    def __enter__(self) -> Interruption:
        # Another handler is left alone, as is a process that ignores interrupts. Handlers can be
        # set in the main thread only, and another thread is never interrupted.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            with suppress(ValueError):
                signal.signal(signal.SIGINT, self._remember)
                self._is_watched = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """After Ctrl-C no error leaves the block."""
        if self._is_watched:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.is_here = self.is_here or isinstance(error, KeyboardInterrupt)
        return self.is_here

    def check(self) -> None:
        """Raise what may have been dropped."""
        if self.is_here:
            raise KeyboardInterrupt

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.is_here = True
        raise KeyboardInterrupt
