"""PyTorch: the portable algorithms with in-place products, around PyTorch's own attention.

Importing this imports no PyTorch: the modules that do are imported by the first call.
"""

from precondattn_torch.backend import Torch

__all__ = ["Torch"]
