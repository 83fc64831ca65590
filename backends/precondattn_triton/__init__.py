"""Triton kernels for PyTorch on a GPU.

Importing this imports neither PyTorch nor Triton: the modules that do are imported by the first
call.
"""

from precondattn_triton.backend import Triton

__all__ = ["Triton"]
