"""A process waits at its exit until gloo's threads have let go of the last exchange.

A thread of gloo that has computed an exchange drops the exchange's tensors afterwards. If they have
Python objects, it needs the interpreter for that. Python up to 3.13 ends a thread that asks for an
interpreter that is exiting. Here it does so within a destructor of C++, and the process aborts:
"terminate called without an active exception".

`destroy_process_group` joins these threads only if nothing else has the group, and every DeviceMesh
has it. A program that drops its meshes afterwards is safe (docs/many_devices.md). For all others
there is this wait. It is mild: the interpreter is left to the threads for a moment, and no group is
destroyed, for others may still use it.
"""

from __future__ import annotations

import time
from pathlib import Path

THREADS = Path("/proc/self/task")
"""Folder of this process's threads, on Linux"""
NAME = "(pt_gloo_runloop)"
"""PyTorch's name for gloo's threads"""
LOOK = 0.001
"""Seconds between two looks, in which the threads have the interpreter"""
LOOKS = 3
"""How many looks must find no thread running: the second and third see one that woke up late"""
LONGEST = 5.0
"""Seconds after which the process ends anyway"""
PAUSE = 0.05
"""Seconds for the threads where they can not be seen"""


def wait_for_gloo() -> None:
    """Wait until no thread of gloo is running.

    One that waits for other processes is not running, and is not waited for.
    """
    if not THREADS.exists():
        time.sleep(PAUSE)
        return
    idle, deadline = 0, time.monotonic() + LONGEST
    while idle < LOOKS and time.monotonic() < deadline:
        states = _states()
        if not states:
            return
        idle = 0 if "R" in states else idle + 1
        time.sleep(LOOK)


def _states() -> list[str]:
    """The state of each thread of gloo: R if it is running or ready to, and S if it sleeps."""
    found = []
    for thread in THREADS.iterdir():
        try:
            text = (thread / "stat").read_text()
        except OSError:  # It has ended meanwhile.
            continue
        if NAME in text:
            found.append(text.rpartition(")")[2].split()[0])
    return found
