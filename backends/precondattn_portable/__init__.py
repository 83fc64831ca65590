"""Blocked algorithms in array-API functions, linear in memory, for NumPy, CuPy and the like.

`backend.py` says which leaves are supported; every other file is one algorithm or a shared part.
They are written in terms of `arithmetic.py`, so that another library's faster products can serve
the same algorithms.
"""

from precondattn_portable.backend import Portable

__all__ = ["Portable"]
