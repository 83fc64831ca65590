"""What one process does: it computes its part of a call, together with the others."""

from __future__ import annotations

import faulthandler
import signal
import traceback
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

import precondattn as pa
from precondattn.dispatch.discovery import discover
from precondattn_conformance.checks import Backend
from precondattn_conformance.inputs import Arrays
from precondattn_conformance.inside import context_manager
from precondattn_conformance.libraries import Torch
from precondattn_conformance.status import FAILED, PASSED, UNSUPPORTED

BEFORE_KILLING = 2.0
"""Seconds before the timeout, at which a hanging process writes its traceback."""


class Start(NamedTuple):
    """What a process is told when it starts."""

    rank: int
    devices: int
    store: str
    """The file by which the processes find each other"""
    backend: Backend
    timeout: float
    traces: str
    """The file for its traceback, if it hangs or crashes"""
    inside: str | None
    """A context manager for all calls, as "module:function\""""


class PartOfCall(NamedTuple):
    """This process's part of a call."""

    mechanism: str
    layout: str
    dtype: str
    inputs: Arrays
    masks: Arrays
    cotangent: np.ndarray


class Reply(NamedTuple):
    """Its output and gradients; or why it has none."""

    status: str
    reason: str = ""
    details: str = ""
    out: np.ndarray | None = None
    gradients: Arrays | None = None


def serve(connection: Connection, start: Start) -> None:
    """The loop of a process: receive a part of a call, send the reply."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import precondattn.parallel.torch  # noqa: F401  Its time is not that of the first case.

    discover()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent decides when to stop.
    with open(start.traces, "w") as file:
        faulthandler.enable(file)
        store = dist.FileStore(start.store, start.devices)
        # The parent ends a process that waits too long: after its timeout, which is shorter.
        waits = timedelta(seconds=10 * start.timeout)
        dist.init_process_group(
            "gloo", store=store, rank=start.rank, world_size=start.devices, timeout=waits
        )
        mesh = init_device_mesh("cpu", (start.devices,), mesh_dim_names=("cp",))
        with context_manager(start.inside)() if start.inside else nullcontext():
            connection.send("started")
            while True:
                try:
                    part = connection.recv()
                except EOFError:
                    return
                faulthandler.dump_traceback_later(
                    max(start.timeout - BEFORE_KILLING, 0.1), file=file
                )
                reply = reply_to(part, mesh, start.backend)
                faulthandler.cancel_dump_traceback_later()
                connection.send(reply)


def reply_to(part: PartOfCall, mesh: Any, backend: Backend) -> Reply:
    """The output and gradients of this process's tokens."""
    try:
        return _computed(part, mesh, backend)
    except pa.UnsupportedError as refusal:
        return Reply(UNSUPPORTED, str(refusal))
    except Exception as error:
        reason = f"raised {type(error).__name__}: {error}"
        return Reply(FAILED, reason, traceback.format_exc(limit=-6))


def _computed(part: PartOfCall, mesh: Any, backend: Backend) -> Reply:
    import torch

    from precondattn.parallel.torch import context_parallel

    library, mechanism = Torch(), pa.parse(part.mechanism)
    inputs = {n: library.array(a, part.dtype).requires_grad_() for n, a in part.inputs.items()}
    masks = {n: library.array(a) for n, a in part.masks.items()}
    if any(leaf.mixes_sequences for leaf in mechanism.program.leaves):
        return Reply(UNSUPPORTED, f"{mechanism}: the output of a sequence depends on all others")
    attn = context_parallel(mechanism, mesh, layout=part.layout)
    refused = attn.refusal(**inputs, **masks)
    if refused is not None:
        return Reply(UNSUPPORTED, f"{mechanism}: {refused}")
    out = attn(**inputs, **masks, backend=backend)
    cotangent = library.array(part.cotangent, part.dtype)
    of_inputs = torch.autograd.grad(out, list(inputs.values()), cotangent)
    for name, array in inputs.items():
        if not np.array_equal(library.numpy(array), part.inputs[name], equal_nan=True):
            return Reply(FAILED, f"has written to the input {name}")
    for what, array in {"the output": out, **dict(zip(inputs, of_inputs, strict=True))}.items():
        found = library.dtype_name(array)
        if found != part.dtype:
            return Reply(FAILED, f"has {what} in {found}, not in {part.dtype}")
    gradients = {n: library.numpy(d) for n, d in zip(inputs, of_inputs, strict=True)}
    return Reply(PASSED, out=library.numpy(out), gradients=gradients)
