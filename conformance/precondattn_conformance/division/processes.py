"""Starts, calls and replaces the processes that divide calls.

    processes = Processes(4, "torch")
    replies = processes.run(parts)      # of each device
    processes.stop()

In PyTorch each device is a process. They communicate by gloo, and find each other through a file.
In JAX one process has all devices. If a process dies, or one has an error and another does not
reply, all are stopped, and the next call starts new ones.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from precondattn_conformance.checks.check import Backend
from precondattn_conformance.division import jax_worker, torch_worker
from precondattn_conformance.division.replies import (
    PartOfCall,
    ProcessStart,
    Reply,
    context_manager,
)
from precondattn_conformance.isolation import cause
from precondattn_conformance.process_settings import shared_by
from precondattn_conformance.status import FAILED

WORKERS = {"torch": torch_worker, "jax": jax_worker}
"""The worker module of each library in which sequences can be divided."""
TIMEOUTS = {"torch": 25.0, "jax": 120.0}
"""Time limits in seconds for one call, which JAX also has to compile."""
TO_START = 120.0
"""Time limit in seconds for all processes to import their modules and find each other."""
TO_FOLLOW = 3.0
"""Seconds that the other processes have to reply after one has an error."""


class LostError(Exception):
    """Raised if not all processes reply to a call; `details` has their tracebacks."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason)
        self.details = details


class LibraryProcesses:
    """The processes of a library, started at the first call."""

    def __init__(
        self,
        devices: int,
        library: str,
        backend: Backend = None,
        timeout: float | None = None,
        inside: str | None = None,
    ) -> None:
        if inside is not None:
            context_manager(inside)  # An error in this name is raised for the whole run.
        self.devices, self.library, self.backend = devices, library, backend
        self.timeout, self.inside = timeout or TIMEOUTS[library], inside
        self.count = devices if library == "torch" else 1
        self.started: list[tuple[BaseProcess, Connection]] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, parts: Sequence[PartOfCall]) -> list[Reply]:
        """The replies of all devices.

        Raises
        ------
        LostError
            if a process dies or does not reply in time.
        RuntimeError
            if they do not start.
        """
        if not self.started:
            self._start()
        connections = [connection for _, connection in self.started]
        each = self.devices // self.count
        for rank, connection in enumerate(connections):
            with suppress(BrokenPipeError):  # A process that has died is found below.
                connection.send(parts[each * rank : each * (rank + 1)])
        until = time.monotonic() + self.timeout
        replies: dict[int, list[Reply]] = {}
        while len(replies) < self.count:
            missing = [c for rank, c in enumerate(connections) if rank not in replies]
            ready = wait(missing, max(until - time.monotonic(), 0))
            if not ready:
                raise self._lost(self._silent(replies))
            for answered in ready:
                rank = connections.index(answered)  # type: ignore[arg-type]
                try:
                    replies[rank] = connections[rank].recv()
                except (EOFError, ConnectionResetError):
                    raise self._lost(self._died(rank)) from None
                if any(reply.status == FAILED for reply in replies[rank]):
                    until = min(until, time.monotonic() + TO_FOLLOW)
        return [reply for rank in range(self.count) for reply in replies[rank]]

    def _silent(self, replies: dict[int, list[Reply]]) -> str:
        """The message if some processes do not reply."""
        names = ", ".join(str(rank) for rank in range(self.count) if rank not in replies)
        all_replies = [(rank, reply) for rank, of in replies.items() for reply in of]
        failed = [f"process {i} {r.reason}" for i, r in all_replies if r.status == FAILED]
        if failed:
            return f"{failed[0]}; no reply of {names} after that"
        return f"it hung: no reply of process {names} after {self.timeout:g} s"

    def _died(self, rank: int) -> str:
        process, _ = self.started[rank]
        process.join()
        return f"process {rank} died of {cause(process.exitcode)}"

    def _lost(self, reason: str) -> LostError:
        details = self._traces()
        self.stop()
        return LostError(reason, details)

    def _traces(self) -> str:
        assert self.folder is not None  # They have started.
        texts = []
        for rank in range(self.devices):
            text = self._trace_of(rank).read_text(errors="replace").strip()
            if text:
                texts.append(f"process {rank}:\n{text}")
        return "\n\n".join(texts)

    def _trace_of(self, rank: int) -> Path:
        assert self.folder is not None  # They have started.
        return Path(self.folder.name) / f"trace_{rank}"

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory(prefix="precondattn-")
        store = str(Path(self.folder.name) / "store")
        with shared_by(self.count):
            for rank in range(self.count):
                connection, theirs = context.Pipe()
                traces = str(self._trace_of(rank))
                start = ProcessStart(
                    rank, self.devices, store, self.backend, self.timeout, traces, self.inside
                )
                process = context.Process(
                    target=WORKERS[self.library].serve, args=(theirs, start), daemon=True
                )
                process.start()
                theirs.close()
                self.started.append((process, connection))
        until = time.monotonic() + TO_START
        for rank, (_, connection) in enumerate(self.started):
            reason = f"process {rank} did not start in {TO_START:g} s"
            try:
                if connection.poll(max(until - time.monotonic(), 0)):
                    connection.recv()
                    continue
            except (EOFError, ConnectionResetError):
                reason = f"process {rank} did not start: it ended, with the message above"
            self.stop()
            raise RuntimeError(reason)

    def stop(self) -> None:
        """End all processes."""
        for _, connection in self.started:
            connection.close()
        for process, _ in self.started:
            process.kill()
            process.join()
        self.started = []
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None
