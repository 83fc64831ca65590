"""Attention over sequences whose tokens are divided among the devices of JAX."""

from precondattn.parallel.jax.context_parallel import ContextParallel, context_parallel
from precondattn.parallel.plan import Plan

__all__ = ["ContextParallel", "Plan", "context_parallel"]
