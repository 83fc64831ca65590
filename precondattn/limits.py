"""Limits of mechanisms: how deep they nest, and how many are remembered.

What is derived from a mechanism (its program, its plans) is kept for those used last. A mechanism
that is no longer kept is derived again, in about a millisecond.
"""

NESTED = 100
"""Preconditioners around a base. Python's stack has room for several calls per level."""

KEPT = 512
"""Mechanisms, or groups of leaf calls, in each cache that has them as keys."""

KEPT_PLANS = 1024
"""Plans: a mechanism has one for each combination of shapes, dtypes and masks."""

KEPT_SIGNATURES = 1024
"""Calls that differ in more than the entries of arrays; each is checked and planned once."""

KEPT_TEXTS = 4096
"""Patterns and leaf calls, which are small and belong to several mechanisms."""
