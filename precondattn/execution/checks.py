"""Which checks of values are on: in this context, in any, or in all of a process.

`checked.py` opens a context, and `examined_values.py` has the checks. Where none is on, a call
reads one number of this module.
"""

from __future__ import annotations

import os
from contextvars import ContextVar, Token
from threading import Lock
from typing import NamedTuple

VARIABLE = "PRECONDATTN_CHECKED"
"""Environment variable: 1 checks every call of the process. It is read at import."""


class Checks(NamedTuple):
    """What is examined of a call, besides its values."""

    layout: bool = True
    """Whether it has no more heads than tokens."""


_always = os.environ.get(VARIABLE, "0") not in ("", "0")
_checks: ContextVar[Checks | None] = ContextVar("checks", default=Checks() if _always else None)
_lock = Lock()

contexts = int(_always)
"""How many contexts of all threads are open. Calls look no further where it is 0."""


def current() -> Checks | None:
    """The checks of this context; None without any."""
    return _checks.get()


def opened(checks: Checks) -> Token[Checks | None]:
    """Begin a context with these checks."""
    global contexts
    with _lock:
        contexts += 1
    return _checks.set(checks)


def close(token: Token[Checks | None]) -> None:
    """End a context."""
    global contexts
    _checks.reset(token)
    with _lock:
        contexts -= 1
