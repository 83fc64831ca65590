"""Real processes: each task in its own, with its output in a file, stopped with its children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from precondattn_gpu.driver import Running
from precondattn_gpu.task import Finished, Task

POLL = 0.05
"""Seconds between two looks at the running processes."""


@dataclass
class Process:
    """A running process."""

    task: Task
    started: float
    popen: subprocess.Popen[bytes]
    output: Path
    result: Path


class Processes:
    """Starts the tasks' processes; their files are removed when the context ends."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self.environment = {**os.environ, **(environment or {})}
        self._folder = tempfile.TemporaryDirectory(prefix="precondattn_gpu_")

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()

    def now(self) -> float:
        return time.monotonic()

    def start(self, task: Task) -> Process:
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        result = folder / "result.json"
        command = [
            argument.replace("{result}", str(result))
            for argument in (*task.prefix, sys.executable, *task.arguments)
        ]
        with (folder / "output").open("wb") as output:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self.environment, **task.environment},
                start_new_session=True,  # So that its children are stopped with it.
            )
        return Process(task, self.now(), popen, folder / "output", result)

    def wait(self, running: Sequence[Running], until: float) -> Running | None:
        while True:
            for each in running:
                assert isinstance(each, Process)
                if each.popen.poll() is not None:
                    return each
            if self.now() >= until:
                return None
            time.sleep(POLL)

    def finish(self, running: Running) -> Finished:
        assert isinstance(running, Process)
        seconds = self.now() - running.started
        code = running.popen.poll()
        _stop(running.popen)
        output = running.output.read_text(encoding="utf-8", errors="replace")
        return Finished(code, output, running.result, seconds)


def _stop(popen: subprocess.Popen[bytes]) -> None:
    """The process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()
