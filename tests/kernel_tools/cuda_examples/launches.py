"""The example kernels, built once, and arrays for them, shared by the simulator's tests."""

import functools
from pathlib import Path

import ml_dtypes
import numpy as np

from precondattn_kernel_tools.cuda_simulator import (
    SimulatedModule,
    checked,
)

EXAMPLES = Path(__file__).parent
ORDERS = [None, "reverse", 0, 1]
TYPES = {
    "__half": np.float16,
    "__nv_bfloat16": ml_dtypes.bfloat16,
    "float": np.float32,
    "double": np.float64,
}
EXPRESSIONS = [
    *(f"transpose<{name}, 8>" for name in TYPES),
    *(f"product<{name}, 8>" for name in TYPES),
    *(f"total<{name}>" for name in TYPES),
    *(f"arithmetic<{name}>" for name in ("__half", "__nv_bfloat16")),
]


@functools.cache
def kernels():
    """The correct example kernels."""
    return SimulatedModule(EXAMPLES / "kernels.cu", EXPRESSIONS)


@functools.cache
def faults():
    """The faulty example kernels."""
    return SimulatedModule(EXAMPLES / "faults.cu")


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def unwritten(*shape, dtype=np.float32):
    return np.full(shape, np.nan, dtype)


def turns(order):
    """The numbers of the threads of three blocks, in execution order."""
    y = np.full(12, -1, np.int32)
    with checked(order):
        kernels().get_function("turns")((3,), (4,), (y, np.zeros(1, np.int32)))
    return y.tolist()
