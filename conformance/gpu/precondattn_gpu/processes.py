"""Processes for tasks: a new one for each task, or a worker that runs tasks of one kind in turn.

The output of a task is in a file. A process is stopped with its children. A worker is not used
again after a task that did not end with exit code 0: the device may be in a bad state there.
"""

from __future__ import annotations

import contextlib
import json
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
from precondattn_gpu.task import Finished, ProcessTask

POLL = 0.05
"""Seconds between two polls of the running processes."""
MOST_WAITED = 5.0
"""The longest wait in seconds for stopped processes to end."""
MOST_IDLE = 16
"""The largest number of idle workers of all kinds; beyond it, the oldest is stopped. Each may hold
2 GB of memory."""


@dataclass
class TaskProcess:
    """A running task and its process."""

    task: ProcessTask
    started: float
    popen: subprocess.Popen[bytes]
    output: Path
    result: Path
    worker: TaskWorker | None = None
    code: int | None = None
    """The exit code that the worker has reported."""


@dataclass
class TaskWorker:
    """A process that runs tasks of one kind, one after another."""

    kind: tuple[object, ...]
    popen: subprocess.Popen[bytes]
    answers: int
    """The file descriptor for the worker's answers, which is read without blocking."""


class TaskProcesses:
    """Starts the tasks' processes; workers are stopped and files removed when the context ends."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self.environment = {**os.environ, **(environment or {})}
        self._folder = tempfile.TemporaryDirectory(
            prefix="precondattn_gpu_", ignore_cleanup_errors=True
        )
        self._idle: list[TaskWorker] = []
        self._stopped: list[subprocess.Popen[bytes]] = []
        """The stopped processes that may not have ended yet."""

    def __enter__(self) -> TaskProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._idle:
            self._stop(worker.popen)
        end = self.now() + MOST_WAITED
        for popen in self._stopped:
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(max(end - self.now(), 0.0))
        self._folder.cleanup()

    def now(self) -> float:
        return time.monotonic()

    def start(self, task: ProcessTask) -> TaskProcess:
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        output, result = folder / "output", folder / "result.json"
        arguments = [each.replace("{result}", str(result)) for each in task.arguments]
        if task.worker:
            worker = self._idle_worker(task)
            worker = worker or self._new_worker(task, output)
            flag, module, *rest = arguments
            assert flag == "-m"
            line = {"module": module, "arguments": rest, "output": str(output)}
            assert worker.popen.stdin is not None
            # A worker that has died meanwhile is found by `wait`.
            with contextlib.suppress(BrokenPipeError):
                worker.popen.stdin.write(f"{json.dumps(line)}\n".encode())
                worker.popen.stdin.flush()
            return TaskProcess(task, self.now(), worker.popen, output, result, worker)
        with output.open("wb") as file:
            popen = subprocess.Popen(
                [*task.prefix, sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**self.environment, **task.environment},
                start_new_session=True,  # Its children are then stopped with it.
            )
        return TaskProcess(task, self.now(), popen, output, result)

    def _idle_worker(self, task: ProcessTask) -> TaskWorker | None:
        """An idle worker for the task."""
        for worker in self._idle:
            if worker.kind == task.kind:
                self._idle.remove(worker)
                return worker
        return None

    def _new_worker(self, task: ProcessTask, output: Path) -> TaskWorker:
        """A new worker for the task. If it can not start, its error goes to `output`."""
        if len(self._idle) >= MOST_IDLE:
            self._stop(self._idle.pop(0).popen)
        with output.open("wb") as file:
            popen = subprocess.Popen(
                [sys.executable, "-m", "precondattn_gpu.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**self.environment, **task.environment},
                start_new_session=True,
            )
        assert popen.stdout is not None
        os.set_blocking(popen.stdout.fileno(), False)
        return TaskWorker(task.kind, popen, popen.stdout.fileno())

    def wait(self, running: Sequence[Running], until: float) -> Running | None:
        while True:
            for each in running:
                assert isinstance(each, TaskProcess)
                if _has_ended(each):
                    return each
            if self.now() >= until:
                return None
            time.sleep(POLL)

    def finish(self, running: Running) -> Finished:
        assert isinstance(running, TaskProcess)
        seconds = self.now() - running.started
        _has_ended(running)
        code = running.code
        if running.worker is not None and code == 0:
            self._idle.append(running.worker)
        else:
            self._stop(running.popen)
        written = running.output.exists()  # A worker writes it once it has begun.
        output = running.output.read_text(encoding="utf-8", errors="replace") if written else ""
        return Finished(code, output, running.result, seconds)

    def _stop(self, popen: subprocess.Popen[bytes]) -> None:
        """Stop a process and its children without waiting: a device's driver may delay the end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        for pipe in (popen.stdin, popen.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._stopped = [each for each in self._stopped if each.poll() is None] + [popen]


def _has_ended(process: TaskProcess) -> bool:
    """Whether the task has ended; its exit code is then known."""
    if process.code is None and process.worker is not None:
        with contextlib.suppress(BlockingIOError):
            answer = os.read(process.worker.answers, 100)
            process.code = int(answer) if answer else None
    if process.code is None:
        process.code = process.popen.poll()
    return process.code is not None
