"""Attention over sequences whose tokens are divided among the processes of PyTorch."""

from precondattn.parallel.torch.context_parallel import ContextParallel, context_parallel
from precondattn.parallel.torch.divided_cache import DividedCache
from precondattn.parallel.torch.redistribute import redistribute

__all__ = ["ContextParallel", "DividedCache", "context_parallel", "redistribute"]
