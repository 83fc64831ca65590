"""The errors of simulated kernels."""

from __future__ import annotations


class CompilationError(RuntimeError):
    """The source does not compile for the simulator. Has the compiler's message."""


class KernelError(RuntimeError):
    """A fault of a kernel, with the line, the thread and the block. Arrays stay as they were."""


class OutOfBoundsError(KernelError, IndexError):
    """An access outside of an array, a shared variable or a local one, or a misaligned one."""


class RaceError(KernelError):
    """Two threads access the same element without an order, and one of them writes."""


class UninitializedError(KernelError):
    """A thread reads shared memory that no thread of the block has written."""


class SynchronizationError(KernelError):
    """A barrier, a shuffle or a vote that some of its threads do not reach, or a deadlock."""


KINDS = (KernelError, OutOfBoundsError, RaceError, UninitializedError, SynchronizationError)
"""Indexed by the runtime's number of the kind."""
