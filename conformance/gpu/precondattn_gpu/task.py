"""Tasks: Python modules that run in a process, and their outcomes."""

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
"""The statuses of a task. `wrong`: a result differs from the oracle's. `failed`: an error was
raised. `crashed`: the process died. `interrupted`: the time limit was reached; the task runs again
in the next call."""


class Finished(NamedTuple):
    """A process that has ended."""

    code: int | None
    """The process's exit code, negative for a signal; None if it was stopped."""
    output: str
    """The process's standard output and errors."""
    result: Path
    """The path of the result file, which may not exist."""
    seconds: float


@dataclass
class TaskOutcome:
    """The outcome of a task."""

    status: str
    message: str = ""
    """One line, or the end of the output."""
    data: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class ProcessTask:
    """A Python module that runs in a process, and writes one file."""

    name: str
    """A name that is unique within a file of results."""
    arguments: tuple[str, ...]
    """Arguments of the Python interpreter: `("-m", "module", …)`. `{result}` is replaced by a
    path."""
    outcome_of: Callable[[Finished], TaskOutcome]
    """Reads the outcome. It is called only if the process ended by itself."""
    timeout: float = 240.0
    """The time limit in seconds, after which the process is stopped."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to the driver's own."""
    prefix: tuple[str, ...] = ()
    """A program that runs the interpreter, with its arguments."""
    worker: str = ""
    """The kind of worker that runs it. A worker runs several tasks in one process that has imported
    its libraries. Empty: a separate process."""
    data: Mapping[str, Json] = field(default_factory=dict)
    """Data that are saved with the result."""
    found: Callable[[str], JsonObject] = lambda output: {}
    """Extracts data from the output, which are saved whatever the outcome."""

    @property
    def kind(self) -> tuple[object, ...]:
        """The key of tasks that may share a worker."""
        return (self.worker, *sorted(self.environment.items()))
