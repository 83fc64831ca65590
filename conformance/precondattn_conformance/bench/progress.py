"""The progress of a run of benchmarks, and its interruption by Ctrl-C."""

from __future__ import annotations

import signal
from contextlib import suppress
from types import FrameType

from rich.markup import escape

from precondattn_conformance import progress
from precondattn_conformance.progress import in_words


class BenchProgress(progress.Progress):
    """The progress of cases, each of which is checked first and then measured in rounds."""

    case, number = "", 0
    round, rounds = 0, 0
    rounds_began = 0.0

    def starts(self, case: str) -> None:
        """A case starts, with its check."""
        self.case, self.number = case, self.number + 1
        self.round, self.rounds = 0, 0

    def at_round(self, number: int, rounds: int) -> None:
        """A round of the case starts. The warm-up is round 0."""
        if number == 0:
            self.rounds_began = self.clock()
        self.round, self.rounds = number, rounds

    def ends(self, text: str) -> None:
        """A case has ended, and `text` is its result."""
        self.advance()
        self.print(f"[dim]{escape(self.case)}: {escape(text)}[/dim]")

    @property
    def seconds_left(self) -> float:
        """The time of the rounds that are left, and of other cases as long as the average one."""
        now = self.clock()
        # The warm-up is one more round.
        left = (now - self.rounds_began) / (self.round + 1) * (self.rounds - self.round)
        total = now - self.began + left
        return left + (self.count - self.number) * total / max(self.number, 1)

    def __str__(self) -> str:
        """The case, its round, and the time left; empty before the first case."""
        if not self.number:
            return ""
        text = f"{self.case} (case {self.number} of {self.count})"
        if not self.rounds:
            return f"{text}: checked first"
        left = in_words(self.seconds_left)
        return f"{text}: round {self.round} of {self.rounds}, about {left} left"


class Interruption:
    """Whether Ctrl-C was pressed since it was entered. It ends the run wherever it is noticed.

    Libraries may turn `KeyboardInterrupt` into another error, and Python drops it within a callback
    of a weak reference. So it is also remembered.
    """

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
