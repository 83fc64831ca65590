"""An error of one process is raised on all, so that none waits for one that has stopped.

Before every exchange each process sends whether it has an error, what it calls, and how many tokens
it has. If one process has an error, or the calls differ, all processes raise the same error.
"""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from precondattn.backend import UnsupportedError
from precondattn.parallel.torch.exit import wait_for_gloo

KINDS = (UnsupportedError, TypeError, ValueError, NotImplementedError, RuntimeError)
"""The types of errors that are raised again; an error becomes the first that it is an instance
of, or the last."""

atexit.register(
    wait_for_gloo
)  # Every call ends with an agreement, and often a program ends with a call.


def agreed(
    owner: str,
    group: ProcessGroup,
    device: torch.device,
    called: str = "",
    numbers: Sequence[int] = (),
    error: Exception | None = None,
) -> list[list[int]]:
    """The `numbers` of every process, after a check that all processes make the same call."""
    digest = int.from_bytes(hashlib.blake2b(called.encode(), digest_size=7).digest(), "big")
    message = torch.tensor([error is None, digest, *numbers], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, message, group=group)
    rows = [row.tolist() for row in everyone]
    if all(row[0] for row in rows) and len({row[1] for row in rows}) == 1:
        return [row[2:] for row in rows]
    said: list[tuple[int | None, str]] = [(None, "")] * len(rows)
    words = called if error is None else str(error)
    kind = next((i for i, kind in enumerate(KINDS) if isinstance(error, kind)), len(KINDS) - 1)
    dist.all_gather_object(said, (None if error is None else kind, words), group=group)
    for rank, (failed, text) in enumerate(said):
        if failed is not None:
            raise KINDS[failed](f"{owner}: process {rank}: {text}") from error
    differs = next(rank for rank, of in enumerate(said) if of != said[0])
    raise ValueError(
        f"{owner}: all processes must call the same; found on process 0 {said[0][1]}, and on "
        f"process {differs} {said[differs][1]}"
    )
