"""Attention over sequences whose tokens are divided among the processes of PyTorch."""

from precondattn.parallel.divided_mechanism import Plan
from precondattn.parallel.torch.context_parallel import ContextParallel, context_parallel
from precondattn.parallel.torch.divided_cache import DividedCache
from precondattn.parallel.torch.redistribute import redistribute

__all__ = ["ContextParallel", "DividedCache", "Plan", "context_parallel", "redistribute"]
