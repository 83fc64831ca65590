"""The interruption of a run of benchmarks by Ctrl-C."""

from __future__ import annotations

import signal
from contextlib import suppress
from types import FrameType


class Interruption:
    """Whether Ctrl-C was pressed since it was entered. It ends the run wherever it is noticed.

    Libraries may turn `KeyboardInterrupt` into another error, and Python drops it within a callback
    of a weak reference. So it is also remembered.
    """

    is_noticed = False
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
        self.is_noticed = self.is_noticed or isinstance(error, KeyboardInterrupt)
        return self.is_noticed

    def check(self) -> None:
        """Raise what may have been dropped."""
        if self.is_noticed:
            raise KeyboardInterrupt

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.is_noticed = True
        raise KeyboardInterrupt
