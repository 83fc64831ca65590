"""Names of modules and classes are replaced by one thread at a time.

A replaced name is replaced for all threads. If two threads replaced it at once, the second would
take the first one's change for the original, and put it back for good.
"""

from __future__ import annotations

import threading

REPLACING = threading.RLock()
"""Held from the replacement of a name until the original is back."""
