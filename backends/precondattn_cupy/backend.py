"""The CuPy backend: which leaves are computed by which kernels.

What has none goes to the backend `portable`, on CuPy arrays; `explain` says so. Where kernels are
simulated, on a machine without a GPU, they are for checking and not for use: the backend then takes
NumPy arrays, and only when it is asked for by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import precondattn as pa
from precondattn.arrays import Array, library_of
from precondattn.backend import Request
from precondattn.kernel_backend import VERBS, KernelBackend
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.read import MEAN
from precondattn_cupy.launch import is_simulated

DTYPES = ("float32", "bfloat16", "float16")
"""Unless kernels have a list of their own."""

RECURRENCES = (pa.GatedDelta, pa.Delta, pa.SSD, pa.Retention, pa.Linear, pa.ConditionedQuery)

LEAST_CAPABILITY = 80
"""8.0: tensor cores that take bfloat16."""


class Cupy(KernelBackend):
    """LUCID, softmax attention, LASER, recurrences and rows of unit norm on a GPU."""

    name = "cupy"
    accelerates = frozenset({"cuda"})
    preference = 20

    @property
    def libraries(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"numpy" if is_simulated() else "cupy"})

    @property
    def only_by_name(self) -> bool:  # type: ignore[override]
        return is_simulated()

    def refusal(self, mechanism: Any, request: Request) -> str | None:
        return _refusal(mechanism, request)

    def kernels(self, mechanism: Any) -> Any:
        return _kernels(mechanism)

    def at_work(self, inputs: Mapping[str, Array]) -> AbstractContextManager[None]:
        return _on_device(inputs)


def _refusal(mechanism: Any, request: Request) -> str | None:
    kernels = _kernels(mechanism)
    if kernels is None:
        return f"has no kernels for {mechanism}"
    dtypes = getattr(kernels, "dtypes", DTYPES)
    if request.dtype not in dtypes:
        return f"takes {', '.join(dtypes)}; found {request.dtype}"
    if not hasattr(kernels, VERBS[request.verb]):
        return f"has no {VERBS[request.verb]} of {mechanism}"
    if not is_simulated():
        if find_spec("cupy") is None:
            return "CuPy is not installed; install precondattn with its extra 'cupy'"
        if (found := _capability()) < LEAST_CAPABILITY:
            return f"its kernels need compute capability {LEAST_CAPABILITY}; found {found}"
    reason: str | None = kernels.refuses(mechanism, request)
    return reason


def _kernels(mechanism: Any) -> Any:
    """What computes a leaf or group, by its own class; None where nothing does."""
    if len(mechanism.program.calls) > 1:
        return _group_kernels([*map(type, mechanism.program.leaves)])
    if type(mechanism) is pa.UnitRows:
        from precondattn_cupy.unit_rows import UnitRows

        return UnitRows()
    if type(mechanism) in RECURRENCES:
        from precondattn_cupy.recurrence.leaves import Recurrence

        return Recurrence()
    if type(mechanism) is pa.LucidSolve:
        from precondattn_cupy.lucid.solve import LucidSolve

        return LucidSolve()
    if type(mechanism) is pa.Softmax and mechanism.read == MEAN:
        from precondattn_cupy.softmax.leaf import Softmax

        return Softmax()
    if type(mechanism) is pa.Softmax and mechanism.read == LOG_MEAN_EXP:
        from precondattn_cupy.softmax.laser import Laser

        return Laser()
    return None


def _group_kernels(leaves: list[type]) -> Any:
    """What computes several calls in one go, by their leaves."""
    if leaves == [pa.LucidSolve, pa.Softmax]:
        from precondattn_cupy.lucid.step import LucidStep

        return LucidStep()
    return None


@cache
def _capability() -> int:
    """Of the current device: 90 for 9.0."""
    import cupy

    return int(cupy.cuda.Device().compute_capability)


@contextmanager
def _on_device(inputs: Mapping[str, Array]) -> Iterator[None]:
    """Launches go to the device of the inputs."""
    first = next(iter(inputs.values()))
    if library_of(first) != "cupy":
        yield
        return
    with first.device:
        yield
