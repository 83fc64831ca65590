"""The state of checked calls: which checks of values are on in this context.

`checked.py` opens a context, and `examined_values.py` has the checks. If no check is on, a call
only reads `contexts`.
"""

from __future__ import annotations

import os
from contextvars import ContextVar, Token
from threading import Lock
from typing import NamedTuple

VARIABLE = "PRECONDATTN_CHECKED"
"""The environment variable that checks every call if it is 1. It is read at import."""


class Checks(NamedTuple):
    """What is checked besides the values of inputs."""

    layout: bool = True
    """Whether a call must not have more heads than tokens."""


_always = os.environ.get(VARIABLE, "0") not in ("", "0")
_checks: ContextVar[Checks | None] = ContextVar("checks", default=Checks() if _always else None)
_lock = Lock()

contexts = int(_always)
"""The number of open contexts in all threads. If it is 0, calls look no further."""


def current() -> Checks | None:
    """The checks of this context; None if there are none."""
    return _checks.get()


def opened(checks: Checks) -> Token[Checks | None]:
    """Open a context with these checks."""
    global contexts
    with _lock:
        contexts += 1
    return _checks.set(checks)


def close(token: Token[Checks | None]) -> None:
    """Close a context."""
    global contexts
    _checks.reset(token)
    with _lock:
        contexts -= 1
