"""Blocked algorithms in array-API functions, linear in memory, for NumPy, CuPy and others.

`backend.py` says which leaves are supported; every other file is one algorithm or a shared part.
They call the operations of `arithmetic.py`, which a backend for another library can replace by
faster ones.
"""

from precondattn_portable.backend import Portable

__all__ = ["Portable"]
