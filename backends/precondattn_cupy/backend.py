"""The CuPy backend: which leaves are computed by which kernels.

What has none goes to the backend `portable`, on CuPy arrays; `explain` says so. Where kernels are
simulated, on a machine without a GPU, they are for checking and not for use: the backend then takes
NumPy arrays, and only when it is asked for by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import precondattn as pa
from precondattn.arrays import Array, library_of
from precondattn.backend import ArraySpec, Backend, Request, Support
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn.mechanism import Arrays, Residuals
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.read import MEAN
from precondattn_cupy.launch import is_simulated

DTYPES = ("float32", "bfloat16", "float16")
"""Unless kernels have a list of their own."""

RECURRENCES = (pa.GatedDelta, pa.Delta, pa.SSD, pa.Retention, pa.Linear, pa.ConditionedQuery)

LEAST_CAPABILITY = 80
"""8.0: tensor cores that take bfloat16."""

VERBS = {"forward": "forward", "vjp": "backward", "extend": "step", "extend_vjp": "step_backward"}
"""The method that answers a verb."""


class Cupy(Backend):
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

    def supports(self, mechanism: Any, request: Request) -> Support:
        reason = _refusal(mechanism, request)
        return Support.yes() if reason is None else Support.no(reason)

    def forward(
        self, mechanism: Any, inputs: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        with _on_device(inputs):
            found: tuple[Array, Residuals] = _kernels(mechanism).forward(mechanism, inputs, frame)
            return found

    def backward(
        self,
        mechanism: Any,
        inputs: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        with _on_device(inputs):
            found: Arrays = _kernels(mechanism).backward(
                mechanism, inputs, frame, out, residuals, cotangent
            )
            return found

    def step(
        self,
        mechanism: Any,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
    ) -> tuple[Array, Updates]:
        with _on_device(inputs):
            found: tuple[Array, Updates] = _kernels(mechanism).step(mechanism, past, inputs, frame)
            return found

    def step_backward(
        self,
        mechanism: Any,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
        cotangent: Array,
        d_buffers: Mapping[str, Array],
    ) -> tuple[Arrays, Arrays]:
        with _on_device(inputs):
            found: tuple[Arrays, Arrays] = _kernels(mechanism).step_backward(
                mechanism, past, inputs, frame, cotangent, d_buffers
            )
            return found

    def residual_shapes(
        self, mechanism: Any, inputs: Mapping[str, ArraySpec], frame: Frame
    ) -> tuple[ArraySpec, ...]:
        found: tuple[ArraySpec, ...] = _kernels(mechanism).residual_shapes(mechanism, inputs)
        return found


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
        from precondattn_cupy.recurrence import Recurrence

        return Recurrence()
    if type(mechanism) is pa.LucidSolve:
        from precondattn_cupy.lucid_solve import LucidSolve

        return LucidSolve()
    if type(mechanism) is pa.Softmax and mechanism.read == MEAN:
        from precondattn_cupy.softmax import Softmax

        return Softmax()
    if type(mechanism) is pa.Softmax and mechanism.read == LOG_MEAN_EXP:
        from precondattn_cupy.laser import Laser

        return Laser()
    return None


def _group_kernels(leaves: list[type]) -> Any:
    """What computes several calls in one go, by their leaves."""
    if leaves == [pa.LucidSolve, pa.Softmax]:
        from precondattn_cupy.lucid_step import LucidStep

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
