"""Blocked algorithms in array-API functions, linear in memory, for NumPy, CuPy and their like.

`backend.py` says what is claimed; each other file is one algorithm, or a piece that several share.
They are written in terms of `arithmetic.py`, so that another library's faster products serve the
same algorithms.
"""

from precondattn_portable.backend import Portable

__all__ = ["Portable"]
