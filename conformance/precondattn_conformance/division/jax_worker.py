"""The JAX worker process, which has all devices and computes the whole of a call.

The devices' parts are joined in order, as `context_parallel` of JAX expects them, and the results
are cut again. The gradient of an input without tokens is one sum; the first device returns it, and
the others return none.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

import precondattn as pa
from precondattn.algebra.declaration import Pattern
from precondattn.arrays import Array, Arrays
from precondattn.parallel.heads import HeadAxes
from precondattn_conformance.checks.check import Backend
from precondattn_conformance.division.parts import OF_TOKENS
from precondattn_conformance.division.replies import (
    PartOfCall,
    ProcessStart,
    Reply,
    answer,
    fault_of,
)
from precondattn_conformance.libraries import JaxLibrary
from precondattn_conformance.status import FAILED, PASSED, UNSUPPORTED

if TYPE_CHECKING:
    from jax.sharding import Mesh

DEVICES = "--xla_force_host_platform_device_count={}"


def serve(connection: Connection, start: ProcessStart) -> None:
    """Set up the devices, and answer until the connection is closed."""
    flags = os.environ.get("XLA_FLAGS", "")  # JAX reads them when it starts, which is here.
    os.environ["XLA_FLAGS"] = f"{flags} {DEVICES.format(start.devices)}"
    import jax

    import precondattn.parallel.jax  # noqa: F401  Its time is not that of the first case.

    with open(start.traces, "w") as traces:
        faulthandler.enable(traces)
        mesh = jax.make_mesh((start.devices,), ("cp",), devices=jax.devices("cpu"))
        answer(connection, start, traces, lambda parts: replies_to(parts, mesh, start.backend))


def replies_to(parts: list[PartOfCall], mesh: Mesh, backend: Backend) -> list[Reply]:
    """The output and gradients of each device's tokens."""
    first, library = parts[0], JaxLibrary()
    mechanism = pa.parse(first.mechanism)
    patterns, of_out = mechanism.inputs, mechanism.program.output
    whole = first._replace(
        inputs={n: joined([part.inputs[n] for part in parts], patterns[n]) for n in first.inputs},
        masks={n: _mask([part.masks[n] for part in parts], n) for n in first.masks},
        cotangent=joined([part.cotangent for part in parts], of_out),
    )
    with library.precision(first.dtype):
        results = _computed(whole, mechanism, library, mesh, backend)
    library.forget()
    if isinstance(results, Reply):
        return [results] * len(parts)
    out, gradients = results
    outs = cut(out, of_out, len(parts))
    cuts = {name: cut(d, patterns[name], len(parts)) for name, d in gradients.items()}
    return [
        Reply(PASSED, out=outs[device], gradients={name: of[device] for name, of in cuts.items()})
        for device in range(len(parts))
    ]


def _computed(
    whole: PartOfCall, mechanism: pa.Mechanism, library: JaxLibrary, mesh: Mesh, backend: Backend
) -> Reply | tuple[np.ndarray, dict[str, np.ndarray]]:
    import jax

    from precondattn.parallel.jax import context_parallel

    inputs = {name: library.array(a, whole.dtype) for name, a in whole.inputs.items()}
    masks = {name: library.array(a) for name, a in whole.masks.items()}
    attn = context_parallel(mechanism, mesh, "cp", layout=whole.layout)
    refused = attn.refusal(**inputs, **masks, backend=backend)
    if refused is not None:
        return Reply(UNSUPPORTED, f"{mechanism}: {refused}")

    @jax.jit
    def with_gradients(inputs: Arrays, masks: Arrays, cotangent: Array) -> tuple[Array, Arrays]:
        out, pullback = jax.vjp(lambda x: attn(**x, **masks, backend=backend), inputs)
        return out, pullback(cotangent)[0]

    cotangent = library.array(whole.cotangent, whole.dtype)
    out, gradients = with_gradients(inputs, masks, cotangent)
    fault = fault_of(library, whole, inputs, {"the output": out, **gradients})
    if fault is not None:
        return Reply(FAILED, fault)
    return library.numpy(out), {name: library.numpy(d) for name, d in gradients.items()}


def joined(parts: list[np.ndarray], pattern: Pattern) -> np.ndarray:
    """The parts of all devices joined along their tokens; for an input without tokens, one part."""
    time = HeadAxes.of_pattern(pattern, parts[0].shape).time
    return parts[0] if time is None else np.concatenate(parts, axis=time)


def cut(whole: np.ndarray, pattern: Pattern, devices: int) -> Sequence[np.ndarray]:
    """The part of each device; a sum without tokens belongs to the first device."""
    time = HeadAxes.of_pattern(pattern, whole.shape).time
    if time is None:
        return [whole, *[np.zeros_like(whole)] * (devices - 1)]
    return np.split(whole, devices, axis=time)


def _mask(parts: list[np.ndarray], name: str) -> np.ndarray:
    return np.concatenate(parts, axis=1) if name in OF_TOKENS else parts[0]
