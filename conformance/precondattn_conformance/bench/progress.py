"""What a run of benchmarks is doing: the case, its round, and about how much time is left.

A terminal shows it in one line, which changes every second. A pipe or a file gets a line every ten
seconds. A thread writes the line, for a check or a round may take minutes. It does no more than
that, so that it does not disturb what is being timed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.markup import escape

EVERY_SECOND, EVERY_TEN_SECONDS = 1.0, 10.0
CLEAR = "\r\x1b[2K"
"""Deletes the line of a terminal."""


class Progress:
    """The progress of `count` cases. Between entering and leaving it, the thread writes."""

    def __init__(
        self, console: Console, count: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console, self.count, self.clock = console, count, clock
        self.began = self.case_began = self.rounds_began = clock()
        self.case, self.number, self.finished = "", 0, 0
        self.round, self.rounds = 0, 0
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

    def starts(self, case: str) -> None:
        """A case starts, with its check."""
        self.case, self.number = case, self.number + 1
        self.round, self.rounds, self.case_began = 0, 0, self.clock()

    def at_round(self, number: int, of: int) -> None:
        """A round of the case starts. The warm-up is round 0."""
        if number == 0:
            self.rounds_began = self.clock()
        self.round, self.rounds = number, of

    def ends(self, text: str) -> None:
        """A case has ended, and `text` is its result."""
        self.finished += 1
        with self._writing:
            self._clear()
            self.console.print(f"[dim]{escape(self.case)}: {escape(text)}[/dim]", soft_wrap=True)

    @property
    def seconds_left(self) -> float | None:
        """The time of the rounds that are left, and of other cases as long as the average one.

        None before the first round.
        """
        if not self.rounds:
            return None
        now = self.clock()
        # The warm-up is one more round.
        left = (now - self.rounds_began) / (self.round + 1) * (self.rounds - self.round)
        total = now - self.began + left
        return left + (self.count - self.number) * total / max(self.number, 1)

    def __str__(self) -> str:
        """The case, its round, and the time left."""
        text = f"{self.case} (case {self.number} of {self.count})"
        left = self.seconds_left
        if left is None:
            return f"{text}: checked first"
        return f"{text}: round {self.round} of {self.rounds}, about {in_words(left)} left"

    def _write(self) -> None:
        while not self._is_over.wait(self._every):
            if not self.number:
                continue
            with self._writing:
                if self.console.is_terminal:
                    self.console.file.write(CLEAR + str(self)[: self.console.width - 1])
                    self.console.file.flush()
                else:
                    self.console.print(str(self), markup=False, highlight=False, soft_wrap=True)

    def _clear(self) -> None:
        if self.console.is_terminal:
            self.console.file.write(CLEAR)


def in_words(seconds: float) -> str:
    """A time in whole seconds or, above two minutes, in whole minutes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
