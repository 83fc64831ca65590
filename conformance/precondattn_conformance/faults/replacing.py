"""A lock for replacing names of modules and classes, which one thread may do at a time.

A replacement applies to all threads. If two threads replaced a name at once, the second would take
the first one's replacement for the original, and restore it permanently.
"""

from __future__ import annotations

import threading

REPLACING = threading.RLock()
"""Locked from the replacement of a name until the original is restored."""
