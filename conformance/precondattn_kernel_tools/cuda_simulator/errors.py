"""Errors of simulated kernels."""

from __future__ import annotations


class CompilationError(RuntimeError):
    """Raised if the source does not compile for the simulator; contains the compiler's message."""


class KernelError(RuntimeError):
    """A fault of a kernel, with the line, the thread and the block. Arrays are left unchanged."""


class OutOfBoundsError(KernelError, IndexError):
    """A misaligned access, or one outside of an array, a shared variable or a local variable."""


class RaceError(KernelError):
    """Two threads access the same element in no defined order, and one of them writes."""


class UninitializedError(KernelError):
    """A thread reads shared memory that no thread of the block has written."""


class SynchronizationError(KernelError):
    """A barrier, a shuffle or a vote that some of its threads do not reach, or a deadlock."""


KINDS = (KernelError, OutOfBoundsError, RaceError, UninitializedError, SynchronizationError)
"""The error classes, indexed by the runtime's error number."""
