"""Mechanisms of this library in the linear layers of existing models."""

from precondattn.integrations.transformers.linear.backends import (
    restore_backend_for,
    use_backend_for,
)
from precondattn.integrations.transformers.linear.conditioned import add_ccq

__all__ = ["add_ccq", "restore_backend_for", "use_backend_for"]
