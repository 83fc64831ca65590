"""Caches: the arrays that are needed to continue a sequence, and the operations on them.

`cache.py` has the class, `kinds.py` the meaning of its buffers, and `slots.py` and `updates.py` how
a leaf declares and changes them. Every other file is one operation.
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
