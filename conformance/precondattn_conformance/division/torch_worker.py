"""The PyTorch worker process, which computes its part of a call together with the others."""

from __future__ import annotations

import faulthandler
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import precondattn as pa
from precondattn_conformance.checks.check import Backend
from precondattn_conformance.division.replies import (
    PartOfCall,
    ProcessStart,
    Reply,
    answer,
    fault_of,
)
from precondattn_conformance.libraries import TorchLibrary
from precondattn_conformance.status import FAILED, PASSED, UNSUPPORTED

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def serve(connection: Connection, start: ProcessStart) -> None:
    """Connect to the other processes, and answer until the connection is closed."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import precondattn.parallel.torch  # noqa: F401  Its time is not that of the first case.

    with open(start.traces, "w") as traces:
        faulthandler.enable(traces)
        store = dist.FileStore(start.store, start.devices)
        # The parent's time limit is shorter: it ends a process that waits too long.
        waits = timedelta(seconds=10 * start.timeout)
        dist.init_process_group(
            "gloo", store=store, rank=start.rank, world_size=start.devices, timeout=waits
        )
        mesh = init_device_mesh("cpu", (start.devices,), mesh_dim_names=("cp",))
        answer(connection, start, traces, lambda parts: [reply_to(parts[0], mesh, start.backend)])


def reply_to(part: PartOfCall, mesh: DeviceMesh, backend: Backend) -> Reply:
    """The output and gradients of this process's tokens."""
    import torch

    from precondattn.parallel.torch import context_parallel

    library, mechanism = TorchLibrary(), pa.parse(part.mechanism)
    inputs = {n: library.array(a, part.dtype).requires_grad_() for n, a in part.inputs.items()}
    masks = {n: library.array(a) for n, a in part.masks.items()}
    attn = context_parallel(mechanism, mesh, layout=part.layout)
    refused = attn.refusal(**inputs, **masks)
    if refused is not None:
        return Reply(UNSUPPORTED, f"{mechanism}: {refused}")
    out = attn(**inputs, **masks, backend=backend)
    cotangent = library.array(part.cotangent, part.dtype)
    of_inputs = torch.autograd.grad(out, list(inputs.values()), cotangent)
    gradients = dict(zip(inputs, of_inputs, strict=True))
    fault = fault_of(library, part, inputs, {"the output": out, **gradients})
    if fault is not None:
        return Reply(FAILED, fault)
    in_numpy = {name: library.numpy(d) for name, d in gradients.items()}
    return Reply(PASSED, out=library.numpy(out), gradients=in_numpy)
