"""The exit of a process, which waits until gloo's threads have released the last exchange.

A thread of gloo releases the tensors of an exchange after it. If they have Python objects, it needs
the interpreter's lock. Python up to 3.13 ends a thread that asks for the lock of an interpreter
that is exiting. Here this happens within a C++ destructor, and the process aborts: "terminate
called without an active exception".

`destroy_process_group` joins these threads only if nothing else refers to the group, and every
DeviceMesh does. A program that drops its meshes afterwards is safe (docs/many_devices.md). This
wait is for all others. It only releases the lock for a moment; it destroys no group, because others
may still use it.
"""

from __future__ import annotations

import time
from pathlib import Path

THREADS = Path("/proc/self/task")
"""The folder that lists this process's threads on Linux"""
NAME = "(pt_gloo_runloop)"
"""PyTorch's name for gloo's threads"""
LONGEST = 5.0
"""Seconds after which the process ends anyway"""


def wait_for_gloo() -> None:
    """Wait until no thread of gloo is running.

    A thread that waits for other processes is not running.
    """
    if not THREADS.exists():
        time.sleep(0.05)
        return
    idle, deadline = 0, time.monotonic() + LONGEST
    while idle < 3 and time.monotonic() < deadline:  # A thread may wake up late.
        states = _states()
        if not states:
            return
        idle = 0 if "R" in states else idle + 1
        time.sleep(0.001)  # The threads can take the lock.


def _states() -> list[str]:
    """The state of each thread of gloo: R if it is running or ready to run, S if it sleeps."""
    found = []
    for thread in THREADS.iterdir():
        try:
            text = (thread / "stat").read_text()
        except OSError:  # It has ended meanwhile.
            continue
        if NAME in text:
            found.append(text.rpartition(")")[2].split()[0])
    return found
