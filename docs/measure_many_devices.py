"""Measure divided calls of 1, 2 and 4 processes, and compare them with the model's predictions.

    python docs/measure_many_devices.py

The constants of the model are measured in the same run: one process alone, and a message to the
next process. Processes share the cores, which the prediction allows for.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from math import ceil, log2
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from recorded import load, save
from torch.distributed.device_mesh import init_device_mesh

from precondattn.parallel.torch import context_parallel

FILE = Path(__file__).with_name("measurements") / "many_devices" / "cpu.json"
TOKENS, HEADS, WIDTH, ROUNDS = 4096, 4, 64, 5
PLANS = (
    ("softmax", "contiguous"),
    ("softmax", "zigzag"),
    ("softmax", "heads"),
    ("gated_delta", "contiguous"),
)


def median_of(run: Callable[[], Any]) -> float:
    """Seconds of the slowest process, the median of rounds; one is not counted."""
    seconds = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        start = time.perf_counter()
        run()
        took = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        seconds.append(float(took))
    return sorted(seconds[1:])[ROUNDS // 2]


def work(rank: int, devices: int, folder: str) -> None:
    """One process."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", devices)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=devices)
    mesh = init_device_mesh("cpu", (devices,), mesh_dim_names=("cp",))
    q, k, v = torch.randn(3, 1, TOKENS // devices, HEADS, WIDTH)
    k = torch.nn.functional.normalize(k, dim=-1)
    inputs = {"q": q, "k": k, "v": v}
    gates = {"g": -torch.rand(q.shape[:3]), "beta": torch.rand(q.shape[:3])}
    found = {}
    with torch.no_grad():
        for name, layout in PLANS:
            attn = context_parallel(name, mesh["cp"], layout=layout)
            given = inputs if name == "softmax" else {**inputs, **gates}
            found[f"{name} {layout}"] = median_of(lambda attn=attn, given=given: attn(**given))
    for what, numbers in (("message", 1), ("megabytes", 4 * 2**18)):
        x = torch.zeros(numbers)
        y = torch.empty_like(x)

        def around(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            for request in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, x, (rank + 1) % devices),
                    dist.P2POp(dist.irecv, y, (rank - 1) % devices),
                ]
            ):
                request.wait()

        found[what] = median_of(around) if devices > 1 else 0.0
    if rank == 0:
        save(Path(folder) / "found.json", found)
    dist.destroy_process_group()


def predicted(plan: str, alone: float, devices: int, found: dict[str, float], cores: int) -> float:
    """The work of the slowest of the processes that share the cores, and the bytes they send."""
    crowd = max(1.0, devices / cores)
    rows = 4 * TOKENS // devices * HEADS * WIDTH
    rate = (found["megabytes"] - found["message"]) / 2**22
    if plan.startswith("gated_delta"):
        rounds = ceil(log2(devices))
        states = 2 * HEADS * WIDTH**2 * 4
        # A single process also computes its tokens twice.
        return alone / devices * crowd + rounds * (found["message"] + states * rate)
    if plan.endswith("heads"):
        sent = 4 * rows * (devices - 1) / devices
        return alone / devices * crowd + 2 * found["message"] + sent * rate
    # The total number of pairs is the same: on shared cores, idle processes leave time to others.
    pairs = 1 / devices if plan.endswith("zigzag") else (2 * devices - 1) / devices**2
    shared = max(pairs, 1 / cores) if devices > cores else pairs
    return alone * shared + (devices - 1) * (found["message"] + 2 * rows * rate)


def record() -> dict[str, Any]:
    """All plans."""
    runs: dict[str, Any] = {}
    for devices in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (devices, folder), devices)
            runs[str(devices)] = load(Path(folder) / "found.json")
    cores = len(os.sched_getaffinity(0))
    rows = [
        {
            "plan": f"{name} {layout}",
            "devices": devices,
            "measured": runs[str(devices)][f"{name} {layout}"],
            "predicted": predicted(
                f"{name} {layout}",
                runs["1"][f"{name} {layout}"],
                devices,
                runs[str(devices)],
                cores,
            ),
        }
        for devices in (2, 4)
        for name, layout in PLANS
    ]
    return {"torch": torch.__version__, "cores": cores, "tokens": TOKENS, "heads": HEADS,
            "width": WIDTH, "runs": runs, "rows": rows}  # fmt: skip


if __name__ == "__main__":
    save(FILE, record())
