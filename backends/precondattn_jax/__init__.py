"""JAX: blocked algorithms, linear in memory, in loops that XLA compiles once.

Importing this imports no JAX: the modules that do are imported by the first call.
"""

from precondattn_jax.backend import Jax

__all__ = ["Jax"]
