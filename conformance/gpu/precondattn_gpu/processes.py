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
    folder: tempfile.TemporaryDirectory[str]

    @property
    def output(self) -> Path:
        return Path(self.folder.name) / "output"

    @property
    def result(self) -> Path:
        return Path(self.folder.name) / "result.json"


class Processes:
    """Starts the tasks' processes."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self.environment = {**os.environ, **(environment or {})}

    def now(self) -> float:
        return time.monotonic()

    def start(self, task: Task) -> Process:
        folder = tempfile.TemporaryDirectory(prefix="precondattn_gpu_")
        result = str(Path(folder.name) / "result.json")
        arguments = [argument.replace("{result}", result) for argument in task.arguments]
        prefix = [argument.replace("{result}", result) for argument in task.prefix]
        with (Path(folder.name) / "output").open("wb") as output:
            popen = subprocess.Popen(
                [*prefix, sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self.environment, **task.environment},
                start_new_session=True,  # So that its children are stopped with it.
            )
        return Process(task, self.now(), popen, folder)

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
        # The folder is kept until the result was read.
        return Finished(code, output, running.result, seconds)


def _stop(popen: subprocess.Popen[bytes]) -> None:
    """The process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()
