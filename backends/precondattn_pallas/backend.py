"""The Pallas backend: which leaves are computed by which kernels.

On a GPU: LUCID's solve, a step of LUCID, softmax attention, LASER and recurrences in chunks. On a
TPU: LUCID's solve and the recurrences, by separate kernels. Where there is neither, JAX interprets
the kernels on a CPU, for checking only: the backend then supports arrays on a CPU, and runs only if
it is requested by name. It interprets a GPU's kernels, or a TPU's if the environment has
PRECONDATTN_PALLAS_INTERPRET=tpu.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING

import precondattn as pa
from precondattn.algebra.piece import Piece
from precondattn.algebra.recurrence import Gate
from precondattn.algebra.recurrences import Recurrences
from precondattn.arrays import Tree
from precondattn.backend import Request
from precondattn.frameworks.jax.backend import JaxBackend, JaxRunner
from precondattn.installed import is_installed
from precondattn.kernel_backend import KernelBackend
from precondattn.kernel_backend.kernel_table import ByOption, Kernels, KernelTable, kernels_in
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.read import MEAN

if TYPE_CHECKING:
    from precondattn_pallas.launch import Interpret

CUDA, TPU = "cuda", "tpu"
DTYPES = {CUDA: ("float32", "bfloat16", "float16"), TPU: ("float32", "bfloat16")}
"""The supported dtypes of each kind of device."""

INTERPRETED = "PRECONDATTN_PALLAS_INTERPRET"
"""The environment variable that names the device whose kernels a CPU interprets."""

DECAYS: tuple[Gate | None, ...] = (None, "fixed", "head")
GATES: tuple[Gate | None, ...] = (*DECAYS, "channel")

RECURRENCES: dict[str, tuple[Recurrences, ...]] = {
    CUDA: (
        Recurrences(gate=GATES, keys=("given", "of the gate"), normaliser=(None, "sum")),
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
    ),
    TPU: (
        Recurrences(gate=DECAYS, normaliser=(None, "sum")),
        Recurrences(("delta",), gate=DECAYS, strength=("scalar",)),
    ),
}

KERNELS: dict[str, KernelTable] = {
    CUDA: {
        pa.LucidSolve: "precondattn_pallas.lucid.solve:LucidSolveKernels",
        **dict.fromkeys(
            (*RECURRENCES[CUDA], pa.ConditionedQuery, pa.PreconditionedKey),
            "precondattn_pallas.recurrence.leaves:RecurrenceKernels",
        ),
        pa.Softmax: ByOption(
            "read",
            {
                MEAN: "precondattn_pallas.softmax.attention:SoftmaxKernels",
                LOG_MEAN_EXP: "precondattn_pallas.softmax.laser:LaserKernels",
            },
        ),
        (pa.LucidSolve, pa.Softmax): "precondattn_pallas.lucid.step:LucidStep",
    },
    TPU: {
        pa.LucidSolve: "precondattn_pallas.tpu.lucid_solve:TpuLucidSolve",
        **dict.fromkeys(
            (*RECURRENCES[TPU], pa.ConditionedQuery),
            "precondattn_pallas.tpu.chunkwise:TpuRecurrence",
        ),
    },
}
"""The table of kernels of each kind of device."""


_described: ContextVar[str | None] = ContextVar("described", default=None)
"""A device to explain plans for, which this machine need not have."""


@cache
def _device() -> str:
    """The device that this process computes on: "cpu", "cuda", "tpu" …"""
    import jax

    platform = jax.default_backend()
    return CUDA if platform == "gpu" else str(platform)


def _has_started() -> bool:
    """Whether JAX has looked for devices, as it has in every process that has a JAX array.

    This function does not start JAX: a process that uses another library would lose GPU memory.
    """
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and getattr(bridge, "backends_are_initialized", lambda: True)()


def is_interpreting() -> bool:
    """Whether kernels are interpreted, on a CPU."""
    if _described.get() in DTYPES:
        return False
    return not _has_started() or _device() not in DTYPES


def target() -> str:
    """The device that the kernels are for, "cuda" or "tpu", also if they are interpreted."""
    return _interpreted() if is_interpreting() else _described.get() or _device()


@cache
def _interpreted() -> str:
    """The device whose kernels a CPU interprets. It is read once, because plans are cached.

    Raises
    ------
    ValueError
        when the environment names another device.
    """
    device = os.environ.get(INTERPRETED, CUDA)
    if device not in DTYPES:
        raise ValueError(f"{INTERPRETED} must be one of {', '.join(DTYPES)}; found {device!r}")
    return device


class Pallas(JaxBackend, KernelBackend):
    """LUCID, LASER, softmax and recurrences on a GPU, LUCID and recurrences on a TPU, for JAX."""

    name = "pallas"
    libraries = frozenset({"jax"})
    accelerates = frozenset({CUDA, TPU})
    preference = 20
    declines = (
        "extend softmax: no step of attention",
        "extend laser: no step of attention",
        "extend lucid: no step of attention",
        "extend lucid_solve: no step of the solve",
    )
    has_ledger = True

    @property
    def only_by_name(self) -> bool:  # type: ignore[override]
        return is_interpreting()

    @contextmanager
    def describing(self, device: str) -> Iterator[None]:
        token = _described.set(device)
        try:
            yield
        finally:
            _described.reset(token)

    def refuses_request(self, request: Request) -> str | None:
        if not is_installed("jax"):
            return "JAX is not installed; install precondattn with its extra 'jax'"
        kernels_for = target()
        device = "cpu" if is_interpreting() else kernels_for
        if request.device != device:
            machine = "a GPU" if kernels_for == CUDA else "a TPU"
            how = "interprets its kernels" if is_interpreting() else f"runs on {machine}"
            return f"{how}: it supports arrays on {device}; found {request.device}"
        if request.dtype not in DTYPES[kernels_for]:
            return f"supports {', '.join(DTYPES[kernels_for])}; found {request.dtype}"
        return None

    def on_device(self) -> str:
        return " on a TPU" if target() == TPU else ""

    def kernels(self, mechanism: Piece) -> Kernels:
        return kernels_of(mechanism, interpret=is_interpreting(), target=target())

    @property
    def table(self) -> KernelTable:  # type: ignore[override]
        return KERNELS[target()]

    def capability(self) -> str:
        """The capability of a GPU, or the kind of a TPU; empty where a device is only described."""
        import jax

        device = jax.devices()[0] if _has_started() and _device() in DTYPES else None
        return str(getattr(device, "compute_capability", "") or getattr(device, "device_kind", ""))

    def assembler(self) -> str:
        import jaxlib

        return f"jaxlib {jaxlib.__version__}"

    def run(self, verb: str, runner: JaxRunner, *arrays: Tree) -> Tree:
        """The runner's method, on several devices of each one's own sequences and heads."""
        import jax

        from precondattn.frameworks.jax.sharding import compiled, on_shards

        leaves = jax.tree.leaves(arrays)
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        is_divided = is_traced or any(len(leaf.devices()) > 1 for leaf in leaves)
        # JAX's interpreter of TPU kernels has effects, which can not be divided.
        if not is_divided or (is_interpreting() and target() == TPU):
            return runner.computing(verb)(*arrays)
        return (on_shards if is_traced else compiled)(verb, runner, *arrays)


def kernels_of(mechanism: Piece, *, interpret: Interpret, target: str = CUDA) -> Kernels:
    """An object that computes a leaf or group on `"cuda"` or `"tpu"`; None where there is none.

    `interpret` is passed to JAX: for a TPU's kernels it may be an `InterpretParams`, and True
    means its defaults.
    """
    kernel_class = kernels_in(KERNELS[target], mechanism)
    if kernel_class is None:
        return None
    if target == TPU and interpret is True:
        from jax.experimental.pallas import tpu as pltpu

        interpret = pltpu.InterpretParams()
    return kernel_class(interpret=interpret)
