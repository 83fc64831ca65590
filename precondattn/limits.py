"""Limits on mechanisms: how deep they may be nested, and how many are kept in caches.

Objects that are derived from a mechanism (its program, its plans) are kept for the mechanisms that
were used last. For others they are derived again, which takes about a millisecond.
"""

NESTED = 100
"""The most preconditioners around a base; Python's stack has room for several calls per level."""

KEPT = 512
"""The most mechanisms, or groups of leaf calls, that each cache keeps."""

KEPT_PLANS = 1024
"""The most plans; a mechanism has one for each combination of shapes, dtypes and masks."""

KEPT_SIGNATURES = 1024
"""The most call signatures; each is checked and planned once."""

KEPT_TEXTS = 4096
"""The most patterns and leaf calls, which are small and shared by mechanisms."""
