"""What every backend with kernels of its own shares: everything on the host around the kernels."""

from precondattn.kernel_backend.backend import VERBS, KernelBackend

__all__ = ["VERBS", "KernelBackend"]
