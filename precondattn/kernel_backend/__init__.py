"""The host code that all backends with kernels share."""

from precondattn.kernel_backend.backend import VERBS, KernelBackend

__all__ = ["VERBS", "KernelBackend"]
