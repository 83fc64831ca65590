"""CUDA kernels on a CPU: g++ compiles them, and every thread, barrier and access is watched.

==================  ==============================================================================
arrays              each lies alone: what is read or written outside of it is found, and so is
                    what is not aligned
shared memory       the same; what is read in it was written before, by a thread of the block
races               two uses of an element that no barrier orders, whatever the order of the run
barriers            all threads come to the same one; in a warp, all lanes of the mask
shuffles            read a lane that takes part
float16, bfloat16   are those of CUDA's own headers
==================  ==============================================================================

Blocks run one after the other, and the threads of a block in turn, each until it waits: in their
own order, in reverse, or in one drawn from a seed (`checked`).

Not simulated: tensor cores (`wmma`, `mma`), asynchronous copies, cooperative groups, clusters and
inline PTX. `PRECONDATTN_SIMULATED` is defined, for a kernel to choose plain C++ in their place.

device/    what kernels include: CUDA's builtins, and CUDA's headers
runtime/   threads, warps, memory and what is wrong with them
"""

from precondattn_kernel_tools.cuda_simulator.errors import (
    CompilationError,
    KernelError,
    OutOfBoundsError,
    RaceError,
    SynchronizationError,
    UninitializedError,
)
from precondattn_kernel_tools.cuda_simulator.module import (
    SimulatedFunction,
    SimulatedModule,
    checked,
)
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
