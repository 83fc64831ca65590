"""Import this module to load an exported PyTorch program without calling a mechanism first.

`torch.export.load` needs the operators `precondattn::*`, which this module registers. The core does
not import PyTorch otherwise, until a call needs it.
"""

from precondattn.execution.torch import autograd

__all__ = ["autograd"]
