"""Pallas kernels for JAX on a GPU, and on a TPU.

Importing this does not import JAX: the modules that do are imported by the first call.
"""

from precondattn_pallas.backend import Pallas

__all__ = ["Pallas"]
