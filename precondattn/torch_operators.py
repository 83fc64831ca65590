"""A module to import before an exported PyTorch program is loaded.

`torch.export.load` needs the operators `precondattn::*`, which this module registers. Without this
import, they are registered by the first call of a mechanism on PyTorch tensors.
"""

from precondattn.frameworks.torch import autograd

__all__ = ["autograd"]
