"""The Triton backend: which leaves are computed by which kernels.

LUCID's solve, LASER, PaTH, softmax attention with options, rows of unit norm, and leaves with a
state: the linear family, the delta rule, gated slot attention, and CCQ's query, alone and with its
backbone. Softmax attention without options is computed by the backend `torch`. Where
Triton interprets its kernels, on a machine without a GPU, they are for checking only: the backend
then supports arrays on a CPU, and runs only if it is requested by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from threading import RLock

import precondattn as pa
from precondattn.algebra.recurrence import Gate
from precondattn.algebra.recurrences import Recurrences
from precondattn.arrays import Array
from precondattn.backend import Request
from precondattn.installed import is_installed
from precondattn.kernel_backend import KernelBackend
from precondattn.kernel_backend.kernel_table import ByOption, Kernels, KernelTable
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.read import MEAN

DTYPES = ("float32", "bfloat16", "float16")

WIDEST_ON_AMD = 64
"""Wider tiles have been compiled for NVIDIA's multiprocessors only, and do not fit AMD's."""

DECAYS: tuple[Gate | None, ...] = (None, "fixed", "head")
GATES: tuple[Gate | None, ...] = (*DECAYS, "channel")

RECURRENCES = (
    Recurrences(gate=GATES, keys=("given", "of the gate"), normaliser=(None, "sum")),
    Recurrences(gate=("channel",), reads=("before, with a bonus",)),
    Recurrences(
        ("delta",),
        gate=GATES,
        erase=("written key", "own key"),
        strength=("scalar", "channel"),
        several_steps=True,
    ),
    Recurrences(
        ("delta",), gate=DECAYS, erase=("own key, before the decay",), strength=("scalar",)
    ),
    Recurrences(("slots",), gate=("slot",)),
)
SHARING = (
    Recurrences(gate=GATES, normaliser=(None, "sum")),
    Recurrences(("delta",), gate=GATES, strength=("scalar",)),
)
"""Recurrences whose pass over the keys can also compute the moments of the keys for CCQ's query."""

_RECURRENCE = "precondattn_triton.recurrence.chunkwise:RecurrenceKernels"
_CONDITIONED_READ = "precondattn_triton.ccq.conditioned_read:ConditionedRead"

KERNELS: KernelTable = {
    pa.UnitRows: "precondattn_triton.unit_rows:UnitRowsKernels",
    pa.LucidSolve: "precondattn_triton.lucid.solve:LucidSolveKernels",
    pa.ConditionedQuery: ByOption(
        "decay",
        {"none": "precondattn_triton.ccq.conditioned_read:RunningCovariance"},
        otherwise=_RECURRENCE,
    ),
    **dict.fromkeys((*RECURRENCES, pa.PreconditionedKey), _RECURRENCE),
    pa.Softmax: ByOption(
        "read",
        {
            LOG_MEAN_EXP: "precondattn_triton.softmax.laser:LaserKernels",
            MEAN: "precondattn_triton.softmax.leaf:SoftmaxKernels",
        },
    ),
    pa.Path: "precondattn_triton.path.leaf:PathKernels",
    (pa.LucidSolve, pa.Softmax): "precondattn_triton.lucid.step:LucidStep",
    (pa.LucidSolve, pa.Path): "precondattn_triton.lucid.path_step:LucidPathStep",
    **{(pa.ConditionedQuery, backbone): _CONDITIONED_READ for backbone in SHARING},
    **{(pa.ConditionedQuery, pa.L2Norm, backbone): _CONDITIONED_READ for backbone in SHARING},
}


_interpreter = RLock()
"""Triton's interpreter keeps its program in global state: one thread at a time may use it."""


def is_interpreting() -> bool:
    """Whether kernels are run by Triton's interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


class Triton(KernelBackend):
    """LUCID, LASER, PaTH, attention with options and recurrences on a GPU."""

    name = "triton"
    libraries = frozenset({"torch"})
    accelerates = frozenset({"cuda"})
    preference = 20
    declines = (
        "transforms: kernels are not mapped by torch.vmap",
        "laser: values of a width that is a multiple of 4",
        "extend lucid_solve: a step of 16 or more tokens",
        "extend lucid: a step of fewer than 16 tokens, if their queries and keys fit no tile",
        "extend path: a step of several tokens with keys wider than 128",
    )
    table = KERNELS
    has_ledger = True

    @property
    def only_by_name(self) -> bool:  # type: ignore[override]
        return is_interpreting()

    def refuses_request(self, request: Request) -> str | None:
        if not _has_triton():
            return "Triton is not installed; install precondattn with its extra 'triton'"
        device, reason = "cuda", "needs a GPU:"
        if is_interpreting():
            device, reason = "cpu", "interprets its kernels:"
        if request.device != device:
            return f"{reason} it supports arrays on {device}; found {request.device}"
        if request.dtype not in DTYPES:
            return f"supports {', '.join(DTYPES)}; found {request.dtype}"
        if request.mapped:
            return "its kernels do not support torch.vmap"
        if request.traced and request.verb == "extend":
            return "its steps can not be traced by torch.compile"
        return None

    def refuses_kernels(self, kernels: Kernels, request: Request) -> str | None:
        widest = max(shape[-1] for name, shape in request.shapes if name in ("k", "v", "o"))
        from precondattn_triton.target import is_amd

        if widest > WIDEST_ON_AMD and is_amd():
            return f"its tiles for AMD's GPUs are for widths up to {WIDEST_ON_AMD}; found {widest}"
        return None

    def capability(self) -> str:
        from precondattn_triton.target import capability

        return capability()

    def assembler(self) -> str:
        from precondattn_triton.target import assembler

        return assembler()

    def launching(self, inputs: Mapping[str, Array]) -> AbstractContextManager[None]:
        return _on_device(inputs)


@cache
def _has_triton() -> bool:
    return is_installed("triton")


NOTHING: AbstractContextManager[None] = nullcontext()


def _on_device(inputs: Mapping[str, Array]) -> AbstractContextManager[None]:
    """A context that launches kernels on the inputs' device, without recording for autograd."""
    import torch

    tensor = next(iter(inputs.values()))
    if is_interpreting():
        return _interpreted()
    is_elsewhere = tensor.is_cuda and tensor.device.index != torch.cuda.current_device()
    if tensor.is_cuda:
        from precondattn_triton.target import warn_of_old_assembler

        warn_of_old_assembler(tensor.device)
    # Most calls need neither, and each takes as long as a third of a launch.
    if torch.is_grad_enabled() or is_elsewhere:
        return _switched(tensor if is_elsewhere else None)
    return NOTHING


@contextmanager
def _switched(to: Array | None) -> Iterator[None]:
    import torch

    device = nullcontext() if to is None else torch.cuda.device(to.device)
    with torch.no_grad(), device:
        yield


@contextmanager
def _interpreted() -> Iterator[None]:
    """A context that interprets kernels with a GPU's arithmetic, in one thread at a time."""
    # Triton's own interpreter computes differently from a GPU, and bfloat16 wrongly.
    import torch

    from precondattn_kernel_tools.triton_interpreter import patch_interpreter

    with torch.no_grad(), _interpreter:
        patch_interpreter()
        yield
