"""Attention over sequences whose tokens are divided among the devices of JAX."""

from precondattn.parallel.divided_mechanism import Plan
from precondattn.parallel.jax.context_parallel import ContextParallel, context_parallel

__all__ = ["ContextParallel", "Plan", "context_parallel"]
