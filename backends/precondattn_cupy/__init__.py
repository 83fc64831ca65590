"""CUDA C++ kernels for CuPy, compiled by NVRTC when they are first called.

`cuda/` has the kernels, and the modules beside it what launches them. Importing this does not
import CuPy: the modules that do are imported by the first call.
"""

from precondattn_cupy.backend import Cupy

__all__ = ["Cupy"]
