"""The CuPy backend: which leaves are computed by which kernels.

Leaves without kernels here run on the backend `portable`, on CuPy arrays; `explain` shows it. Where
kernels are simulated, on a machine without a GPU, they are for checking only: the backend then
supports NumPy arrays, and only when it is requested by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import precondattn as pa
from precondattn.algebra.recurrence import Erase, Gate
from precondattn.algebra.recurrences import Recurrences
from precondattn.arrays import Array, library_of
from precondattn.backend import Request
from precondattn.installed import is_installed
from precondattn.kernel_backend import KernelBackend
from precondattn.kernel_backend.kernel_table import ByOption, Kernels, KernelTable
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.read import MEAN
from precondattn_cupy.launch import is_simulated

DTYPES = ("float32", "bfloat16", "float16")
"""The supported dtypes of a kernel that does not declare `dtypes`."""

LEAST_CAPABILITY = 80
"""Compute capability 8.0, the first whose tensor cores multiply bfloat16."""

KEYS: tuple[Erase, ...] = ("written key", "own key")
GATES: tuple[Gate | None, ...] = (None, "fixed", "head", "channel")
SCANNED = (
    Recurrences(gate=(None, "fixed", "head"), normaliser=(None, "sum")),
    Recurrences(gate=("channel",), keys=("given", "of the gate")),
    Recurrences(("delta",), gate=GATES, erase=KEYS, strength=("scalar",)),
)

KERNELS: KernelTable = {
    pa.UnitRows: "precondattn_cupy.unit_rows:UnitRowsKernels",
    **dict.fromkeys(
        (*SCANNED, pa.ConditionedQuery, pa.PreconditionedKey),
        "precondattn_cupy.scan:RecurrenceKernels",
    ),
    pa.LucidSolve: "precondattn_cupy.lucid.solve:LucidSolveKernels",
    pa.Softmax: ByOption(
        "read",
        {
            MEAN: "precondattn_cupy.softmax.leaf:SoftmaxKernels",
            LOG_MEAN_EXP: "precondattn_cupy.softmax.laser:LaserKernels",
        },
    ),
    (pa.LucidSolve, pa.Softmax): "precondattn_cupy.lucid.step:LucidStep",
}

ONE_BY_ONE = ("softmax", "laser", "row_normalized", "ccq", "lucid")
"""Mechanisms whose keys are cached."""


class Cupy(KernelBackend):
    """LUCID, softmax attention, LASER, recurrences and rows of unit norm on a GPU."""

    name = "cupy"
    accelerates = frozenset({"cuda"})
    preference = 20
    declines = (
        *(f"extend {name}: a step of one token" for name in ONE_BY_ONE),
        "extend lucid_solve: no step of the solve alone",
        "cache_operations: steps of attention are of one token",
    )
    table = KERNELS
    has_ledger = True

    @property
    def libraries(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"numpy" if is_simulated() else "cupy"})

    @property
    def only_by_name(self) -> bool:  # type: ignore[override]
        return is_simulated()

    def refuses_kernels(self, kernels: Kernels, request: Request) -> str | None:
        dtypes = getattr(kernels, "dtypes", DTYPES)
        if request.dtype not in dtypes:
            return f"supports {', '.join(dtypes)}; found {request.dtype}"
        if is_simulated():
            return None
        if not is_installed("cupy"):
            return "CuPy is not installed; install precondattn with its extra 'cupy'"
        capability = _capability()
        if capability is not None and capability < LEAST_CAPABILITY:
            return f"its kernels need compute capability {LEAST_CAPABILITY}; found {capability}"
        return None

    def capability(self) -> str:
        capability = _capability()
        return "" if capability is None else f"{capability // 10}.{capability % 10}"

    def assembler(self) -> str:
        from cupy.cuda import nvrtc

        major, minor = nvrtc.getVersion()
        return f"NVRTC {major}.{minor}"

    def launching(self, inputs: Mapping[str, Array]) -> AbstractContextManager[None]:
        return _on_device(inputs)


@cache
def _capability() -> int | None:
    """The compute capability of the current device: 90 for 9.0; None without one."""
    import cupy

    try:
        return int(cupy.cuda.Device().compute_capability)
    except cupy.cuda.runtime.CUDARuntimeError:
        return None


@contextmanager
def _on_device(inputs: Mapping[str, Array]) -> Iterator[None]:
    """A context that launches kernels on the device of the inputs."""
    array = next(iter(inputs.values()))
    with array.device if library_of(array) == "cupy" else nullcontext():
        yield
