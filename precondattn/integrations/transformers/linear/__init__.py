"""Mechanisms of this library in the linear layers of existing models."""

from precondattn.integrations.transformers.linear.backends import (
    restore_backend_for,
    use_backend_for,
)

__all__ = ["restore_backend_for", "use_backend_for"]
