"""The Pallas backend: which leaves are computed by which kernels.

On a GPU: LUCID's solve, a step of LUCID, softmax attention, LASER and recurrences in chunks. On a
TPU: LUCID's solve and the recurrences, by kernels of their own. Where there is neither, kernels are
interpreted by JAX on a CPU, for checking and not for use: the backend then takes arrays there, and
only when it is asked for by name. Interpreted are a GPU's kernels, or, where the environment has
PRECONDATTN_PALLAS_INTERPRET=tpu, a TPU's.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

import precondattn as pa
from precondattn.backend import Request
from precondattn.kernel_backend import VERBS, KernelBackend
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.read import MEAN

CUDA, TPU = "cuda", "tpu"
DTYPES = {CUDA: ("float32", "bfloat16", "float16"), TPU: ("float32", "bfloat16")}
"""By the device that kernels are for."""

INTERPRETED = "PRECONDATTN_PALLAS_INTERPRET"
"""Of the environment: for which device the kernels are that a CPU interprets."""

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
"""Leaves made of recurrences."""


@cache
def _device() -> str:
    """Where this process computes: "cpu", "cuda", "tpu" …"""
    import jax

    platform = jax.default_backend()
    return CUDA if platform == "gpu" else str(platform)


def _has_started() -> bool:
    """Whether JAX has looked for devices: whoever has an array of it has made it do so.

    Others, who may have imported it and work with another library, do not have it take a GPU.
    """
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and getattr(bridge, "backends_are_initialized", lambda: True)()


def is_interpreting() -> bool:
    """Whether kernels are interpreted, on a CPU."""
    return not _has_started() or _device() not in DTYPES


def target() -> str:
    """The device that kernels are for, also where they are interpreted."""
    return _interpreted() if is_interpreting() else _device()


@cache
def _interpreted() -> str:
    """Whose kernels a CPU interprets; the environment is read once, as plans of calls are kept.

    Raises
    ------
    ValueError
        where it asks for the kernels of another device.
    """
    asked = os.environ.get(INTERPRETED, CUDA)
    if asked not in DTYPES:
        raise ValueError(f"{INTERPRETED} has to be one of {', '.join(DTYPES)}; found {asked!r}")
    return asked


class Pallas(KernelBackend):
    """LUCID, LASER, softmax and recurrences on a GPU, LUCID and recurrences on a TPU, for JAX."""

    name = "pallas"
    libraries = frozenset({"jax"})
    accelerates = frozenset({CUDA, TPU})
    preference = 20

    @property
    def only_by_name(self) -> bool:
        return is_interpreting()

    def refusal(self, mechanism: Any, request: Request) -> str | None:
        return _refusal(mechanism, request)

    def kernels(self, mechanism: Any) -> Any:
        return _kernels(mechanism)


def _refusal(mechanism: Any, request: Request) -> str | None:
    if find_spec("jax") is None:
        return "JAX is not installed; install precondattn with its extra 'jax'"
    own = target()
    place = "cpu" if is_interpreting() else own
    if request.device != place:
        machine = "a GPU" if own == CUDA else "a TPU"
        how = "interprets its kernels here" if is_interpreting() else f"found {machine} here"
        return f"{how}, and then takes arrays on {place}; found {request.device}"
    if request.dtype not in DTYPES[own]:
        return f"takes {', '.join(DTYPES[own])}; found {request.dtype}"
    kernels = _kernels(mechanism)
    if kernels is None:
        return f"has no kernels for {mechanism}" + (" on a TPU" if own == TPU else "")
    if not hasattr(kernels, VERBS[request.verb]):
        return f"has no {VERBS[request.verb]} of {mechanism}"
    reason: str | None = kernels.refuses(mechanism, request)
    return reason


def _kernels(mechanism: Any) -> Any:
    return kernels_of(mechanism, interpret=is_interpreting(), target=target())


def kernels_of(mechanism: Any, *, interpret: Any, target: str = CUDA) -> Any:
    """What computes a leaf or group on a device, `"cuda"` or `"tpu"`; None where nothing does.

    `interpret` is what JAX is told: for a TPU's kernels it may be `InterpretParams`, which True
    stands for the defaults of.
    """
    if target == TPU:
        return _kernels_of_a_tpu(mechanism, interpret)
    if len(mechanism.program.calls) > 1:
        if [*map(type, mechanism.program.leaves)] != [pa.LucidSolve, pa.Softmax]:
            return None
        from precondattn_pallas.lucid.step import LucidStep

        return LucidStep(interpret=interpret)
    if type(mechanism) is pa.LucidSolve:
        from precondattn_pallas.lucid.solve import LucidSolve

        return LucidSolve(interpret=interpret)
    if type(mechanism) in RECURRENT:
        from precondattn_pallas.recurrence.leaves import Recurrence

        return Recurrence(interpret=interpret)
    if type(mechanism) is pa.Softmax and mechanism.read == MEAN:
        from precondattn_pallas.softmax.attention import Attention

        return Attention(interpret=interpret)
    if type(mechanism) is pa.Softmax and mechanism.read == LOG_MEAN_EXP:
        from precondattn_pallas.softmax.laser import Laser

        return Laser(interpret=interpret)
    return None


def _kernels_of_a_tpu(mechanism: Any, interpret: Any) -> Any:
    if interpret is True:
        from jax.experimental.pallas import tpu as pltpu

        interpret = pltpu.InterpretParams()
    if type(mechanism) is pa.LucidSolve:
        from precondattn_pallas.tpu.lucid_solve import TpuLucidSolve

        return TpuLucidSolve(interpret=interpret)
    if type(mechanism) in RECURRENT:
        from precondattn_pallas.tpu.recurrence import TpuRecurrence

        return TpuRecurrence(interpret=interpret)
    return None
