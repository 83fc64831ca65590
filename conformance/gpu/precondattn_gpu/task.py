"""A task: what a stage runs in a process, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from precondattn.json_types import Json, JsonObject


PASSED, WRONG, FAILED, CRASHED = "passed", "wrong", "failed", "crashed"
UNSUPPORTED, TIMED_OUT, INTERRUPTED = "unsupported", "timed out", "interrupted"
STATUSES = (PASSED, WRONG, FAILED, CRASHED, UNSUPPORTED, TIMED_OUT, INTERRUPTED)
"""`wrong`: a result differs from the oracle's. `failed`: an error was raised. `crashed`: the
process died. `interrupted`: the time was over; the task runs again in the next call."""


class Finished(NamedTuple):
    """A process that has ended."""

    code: int | None
    """Its exit code, negative for a signal; None if it was stopped."""
    output: str
    """What it wrote to the terminal."""
    result: Path
    """The file that it was asked to write; it may not exist."""
    seconds: float


@dataclass
class TaskOutcome:
    """What came of a task."""

    status: str
    message: str = ""
    """One line, or the end of the output."""
    data: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class ProcessTask:
    """A Python module that runs in a process, and writes one file."""

    name: str
    """Unique in its stage."""
    arguments: tuple[str, ...]
    """Of the Python interpreter: `("-m", "module", …)`. `{result}` is replaced by a path."""
    read: Callable[[Finished], TaskOutcome]
    """What came of it. It is called only if the process ended by itself."""
    seconds: float = 20.0
    """An estimate of its time."""
    timeout: float = 240.0
    """It is stopped after this many seconds."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to the driver's own."""
    prefix: tuple[str, ...] = ()
    """A program that runs the interpreter, with its arguments."""
    continues: bool = False
    """Whether what it has done stays if it is stopped, so that it begins also where its estimate
    ends too late."""
    worker: str = ""
    """The kind of worker that runs it after other tasks of that kind, in one process that has
    imported its libraries; empty: a process of its own."""
    data: Mapping[str, Json] = field(default_factory=dict)
    """What is saved with the result."""
    found: Callable[[str], JsonObject] = lambda output: {}
    """Data in its output that are saved whatever came of it."""

    @property
    def kind(self) -> tuple[object, ...]:
        """Tasks of the same kind may share a worker."""
        return (self.worker, *sorted(self.environment.items()))
