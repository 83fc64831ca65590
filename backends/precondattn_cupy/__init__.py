"""CUDA C++ kernels for CuPy, compiled by NVRTC at their first call.

`cuda/` has the kernels, and the other modules launch them. Importing this package does not import
CuPy: the modules that do are imported by the first call.
"""

from precondattn_cupy.backend import Cupy

__all__ = ["Cupy"]
