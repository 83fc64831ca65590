"""The Triton backend: which leaves are computed by which kernels.

LUCID's solve, LASER, PaTH, differential attention, rows of unit norm, and leaves with a state: the
linear family, the delta rule, gated slot attention, CCQ's query, alone and with its backbone.
Softmax around them is PyTorch's own, by the backend `torch`. Where Triton interprets its kernels,
on a machine without a GPU, they are for checking and not for use: the backend then takes arrays on
a CPU, and only when it is asked for by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import precondattn as pa
from precondattn.arrays import Array
from precondattn.backend import Request
from precondattn.kernel_backend import VERBS, KernelBackend
from precondattn.spec.difference import Difference
from precondattn.spec.l2_norm import L2Norm
from precondattn.spec.laser import LOG_MEAN_EXP

DTYPES = ("float32", "bfloat16", "float16")
WIDEST_ON_AMD = 64
"""Wider tiles have been compiled for NVIDIA's multiprocessors only, and do not fit AMD's."""

RECURRENT = (
    pa.GatedDelta,
    pa.Delta,
    pa.SSD,
    pa.Retention,
    pa.Linear,
    pa.GLA,
    pa.GSA,
    pa.ConditionedQuery,
)
"""By the leaf's own class: a subclass may mean something else."""

SHARING = (pa.GatedDelta, pa.Delta, pa.SSD, pa.Retention, pa.Linear)
"""Of these, the backbones that go over the very keys of which CCQ's query has the moments."""


def is_interpreting() -> bool:
    """Whether kernels are run by Triton's interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


class Triton(KernelBackend):
    """LUCID, LASER, PaTH, differential attention and recurrences on a GPU."""

    name = "triton"
    libraries = frozenset({"torch"})
    accelerates = frozenset({"cuda"})
    preference = 20

    @property
    def only_by_name(self) -> bool:
        return is_interpreting()

    def refusal(self, mechanism: Any, request: Request) -> str | None:
        return _refusal(mechanism, request)

    def kernels(self, mechanism: Any) -> Any:
        return _kernels(mechanism)

    def at_work(self, inputs: Mapping[str, Array]) -> AbstractContextManager[None]:
        return _on_device(inputs)


def _refusal(mechanism: Any, request: Request) -> str | None:
    if not _is_installed():
        return "Triton is not installed; install precondattn with its extra 'triton'"
    place = "cpu" if is_interpreting() else "cuda"
    if request.device != place:
        how = "interprets its kernels here, and then" if is_interpreting() else "is for GPUs, and"
        return f"{how} takes arrays on {place}; found {request.device}"
    if request.dtype not in DTYPES:
        return f"takes {', '.join(DTYPES)}; found {request.dtype}"
    if request.mapped:
        return "its kernels know nothing of torch.vmap"
    if request.traced and request.verb == "extend":
        return "its steps can not be traced by torch.compile"
    kernels = _kernels(mechanism)
    if kernels is None:
        return f"has no kernels for {mechanism}"
    if not hasattr(kernels, VERBS[request.verb]):
        return f"has no {VERBS[request.verb]} of {mechanism}"
    widest = max(shape[-1] for name, shape in request.shapes if name in ("k", "v", "o"))
    if widest > WIDEST_ON_AMD and _is_amd():
        return f"its tiles for AMD's GPUs are for widths up to {WIDEST_ON_AMD}; found {widest}"
    reason: str | None = kernels.refuses(mechanism, request)
    return reason


def _kernels(mechanism: Any) -> Any:
    """What computes a leaf or group; None where nothing does."""
    if len(mechanism.program.calls) > 1:
        return _group_kernels([*map(type, mechanism.program.leaves)])
    if type(mechanism) is pa.UnitRows:
        from precondattn_triton.unit_rows import UnitRows

        return UnitRows()
    if type(mechanism) is pa.LucidSolve:
        from precondattn_triton.lucid.solve import LucidSolve

        return LucidSolve()
    if type(mechanism) is pa.ConditionedQuery and mechanism.decay == "none":
        from precondattn_triton.ccq.conditioned_read import RunningCovariance

        return RunningCovariance()
    if type(mechanism) in RECURRENT:
        from precondattn_triton.recurrence.leaves import Recurrence

        return Recurrence()
    if type(mechanism) is pa.Softmax and mechanism.read == LOG_MEAN_EXP:
        from precondattn_triton.softmax.laser import Laser

        return Laser()
    if type(mechanism) is pa.Path:
        from precondattn_triton.path.leaf import Path

        return Path()
    return None


def _group_kernels(leaves: list[type]) -> Any:
    """What computes several calls in one go, by their leaves."""
    if leaves == [pa.LucidSolve, pa.Softmax]:
        from precondattn_triton.lucid.step import LucidStep

        return LucidStep()
    if leaves == [pa.Softmax, pa.Softmax, Difference]:
        from precondattn_triton.softmax.differential import Differential

        return Differential()
    if leaves[0] is pa.ConditionedQuery and leaves[1:-1] in ([], [L2Norm]):
        from precondattn_triton.ccq.conditioned_read import ConditionedRead

        return ConditionedRead() if leaves[-1] in SHARING else None
    return None


def _is_amd() -> bool:
    from precondattn_triton.precision import is_amd

    return is_amd()


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


@contextmanager
def _on_device(inputs: Mapping[str, Array]) -> Iterator[None]:
    """Launches go to the device of the inputs, and nothing is recorded for a gradient."""
    import torch

    if is_interpreting():
        # Triton's own interpreter has another arithmetic than a GPU, and a wrong one of bfloat16.
        from precondattn_kernel_tools.triton_interpreter import patch_interpreter

        patch_interpreter()
    first = next(iter(inputs.values()))
    device = torch.cuda.device(first.device) if first.is_cuda else nullcontext()
    with torch.no_grad(), device:
        yield
