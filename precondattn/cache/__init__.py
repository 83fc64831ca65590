"""Caches: the arrays that `extend` needs to continue sequences, and the operations on them.

`cache.py` has the class `Cache`, and `kinds.py` the kinds of its buffers. `slots.py` has the
declarations of a leaf's buffers, and `updates.py` the changes that a step makes to them. Every
other file is one operation.
"""

from precondattn.cache.cache import Cache
from precondattn.cache.slots import KEY_MASK, Slot, new_buffer
from precondattn.cache.snapshots import Snapshot
from precondattn.cache.updates import Append, Replace, Rewrite, Update, Updates, append, updated

__all__ = [
    "KEY_MASK",
    "Append",
    "Cache",
    "Replace",
    "Rewrite",
    "Slot",
    "Snapshot",
    "Update",
    "Updates",
    "append",
    "new_buffer",
    "updated",
]
