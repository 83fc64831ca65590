"""The progress of a run: finished cases, and about how much time is left.

A terminal shows it in one line, which changes every second. A pipe or a file gets a line every ten
seconds. A thread writes the line, since a case may take minutes. It does nothing else, so that it
does not disturb timings.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console

EVERY_SECOND, EVERY_TEN_SECONDS = 1.0, 10.0
CLEAR = "\r\x1b[2K"
"""Escape sequence that clears a terminal's line."""


class Progress:
    """The progress of `count` cases. As a context manager, it runs a thread that writes."""

    def __init__(
        self, console: Console, count: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console, self.count, self.clock = console, count, clock
        self.began = self.first_finished = clock()
        self.finished, self.failed = 0, 0
        self._every = EVERY_SECOND if console.is_terminal else EVERY_TEN_SECONDS
        self._is_over = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._write, daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._clear()

    def advance(self, *, is_failed: bool = False) -> None:
        """Count one more finished case."""
        if not self.finished:
            self.first_finished = self.clock()
        self.finished += 1
        self.failed += is_failed

    def print(self, text: str) -> None:
        """Print a line of markup that is kept above the progress line."""
        with self._writing:
            self._clear()
            self.console.print(text, soft_wrap=True)

    @property
    def seconds_left(self) -> float | None:
        """The time of the remaining cases, if they take as long as those before.

        None before the second case has finished, since the first includes starting processes.
        """
        if self.finished < 2:
            return None
        of_one = (self.clock() - self.first_finished) / (self.finished - 1)
        return of_one * (self.count - self.finished)

    def __str__(self) -> str:
        """The numbers of finished and failed cases, and the time left."""
        text = f"{self.finished} of {self.count} cases, {self.failed} failed"
        left = self.seconds_left
        return text if left is None else f"{text}, about {in_words(left)} left"

    def _write(self) -> None:
        while not self._is_over.wait(self._every):
            text = str(self)
            with self._writing:
                if self.console.is_terminal:
                    self.console.file.write(CLEAR + text[: self.console.width - 1])
                    self.console.file.flush()
                else:
                    self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _clear(self) -> None:
        if self.console.is_terminal:
            self.console.file.write(CLEAR)


def in_words(seconds: float) -> str:
    """A time in whole seconds or, above two minutes, in whole minutes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
