"""Simulates CUDA kernels on a CPU: g++ compiles them; every thread, barrier and access is checked.

==================  ==============================================================================
arrays              an access outside of its array, or a misaligned one, is an error
shared memory       as for arrays; so is reading an element that no thread of the block has written
races               two accesses to an element without a barrier between, in any execution order
barriers            all threads must reach the same barrier; in a warp, all lanes of the mask
shuffles            must read a lane that participates
float16, bfloat16   are those of CUDA's headers
==================  ==============================================================================

Blocks run one at a time, and the threads of a block take turns, each until it waits. The order is
ascending, reversed or random (`checked`).

Not simulated: tensor cores (`wmma`, `mma`), asynchronous copies, cooperative groups, clusters and
inline PTX. `PRECONDATTN_SIMULATED` is defined, so that a kernel can use plain C++ instead.

device/    the headers of kernels: CUDA's builtins, and CUDA's own headers
runtime/   threads, warps and memory, and their errors
"""

from precondattn_kernel_tools.cuda_simulator.module import (
    KernelError,
    OutOfBoundsError,
    RaceError,
    SimulatedFunction,
    SimulatedModule,
    SynchronizationError,
    UninitializedError,
    checked,
)
from precondattn_kernel_tools.cuda_simulator.shared_declarations import CompilationError
from precondattn_kernel_tools.cuda_toolkit import MissingToolError

__all__ = [
    "CompilationError",
    "KernelError",
    "MissingToolError",
    "OutOfBoundsError",
    "RaceError",
    "SimulatedFunction",
    "SimulatedModule",
    "SynchronizationError",
    "UninitializedError",
    "checked",
]
