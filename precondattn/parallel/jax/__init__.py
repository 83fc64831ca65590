"""Attention over sequences whose tokens are divided among the devices of JAX."""

from precondattn.parallel.jax.context_parallel import ContextParallel, context_parallel

__all__ = ["ContextParallel", "context_parallel"]
