"""What a simulated kernel does wrong."""

from __future__ import annotations


class CompilationError(RuntimeError):
    """The source does not compile for the simulator; has the compiler's message."""


class KernelError(RuntimeError):
    """A fault of a kernel, with the line, the thread and the block. Arrays stay as they were."""


class OutOfBoundsError(KernelError, IndexError):
    """An access outside of an array, a shared variable or a local one, or a misaligned one."""


class RaceError(KernelError):
    """Two threads use the same element, one of them writes, and nothing orders the two."""


class UninitializedError(KernelError):
    """Shared memory is read that no thread of the block has written."""


class SynchronizationError(KernelError):
    """A barrier, a shuffle or a vote that not all of its threads come to, or that never ends."""


KINDS = (KernelError, OutOfBoundsError, RaceError, UninitializedError, SynchronizationError)
"""By the runtime's number of the kind."""
