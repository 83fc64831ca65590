"""Measure LUCID over long sequences on 8 processes: its pipelined solve, and all-gathered keys.

    python docs/measure_divided_lucid.py             16K to 64K tokens in both ways, then more
    python docs/measure_divided_lucid.py 65536       no more than this
    python docs/measure_divided_lucid.py --draw      update the page from what was saved

`cyclic`      `context_parallel("lucid", mesh, layout="cyclic[block=B]")`, B of `BLOCKS`
`gathered`    every process gathers all keys and values, solves all tokens, and attends from its own

Processes share the cores, so the time of the slowest process does not predict the time on as many
machines. The CPU seconds of each process do, since they do not include waiting.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import drawing
import numpy as np
import recorded
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from drawing import panels
from recorded import DOCS, table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import precondattn as pa
from precondattn.parallel.layouts import TokenOrder, from_layout
from precondattn.parallel.torch import context_parallel
from precondattn_conformance.libraries import TorchLibrary
from precondattn_conformance.memory import MALLOC_SETTINGS, peak_of

PAGE = DOCS / "many_devices_lucid.md"
FILE = DOCS / "measurements" / "many_devices" / "lucid.json"
DEVICES, HEADS, WIDTH = 8, 1, 16
COMPARED = (2**14, 2**15, 2**16)
LONGER = (2**18, 2**20)
BLOCKS = {2**20: 4096}
"""The layout's block size by the number of tokens; 512 if not listed"""


def layout_of(tokens: int) -> str:
    return f"cyclic[block={BLOCKS.get(tokens, 512)}]"


def parts_of(tokens: int, rank: int) -> list[Tensor]:
    """q, k and v of a process's tokens: few directions of keys, as in trained models."""
    made = torch.Generator().manual_seed(rank)
    shape = (1, tokens // DEVICES, HEADS, WIDTH)
    centres = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(99))
    of_token = torch.randint(64, shape[:3], generator=made)
    q, k, v = (torch.randn(shape, generator=made) for _ in range(3))
    return [q, centres[of_token] + 0.5 * k, v]


def gathered(q: Tensor, k: Tensor, v: Tensor, tokens: int) -> Tensor:
    """LUCID of this process's tokens, from the keys and values of all."""
    whole = []
    for x in (k, v):
        parts = [torch.empty_like(x) for _ in range(DEVICES)]
        dist.all_gather(parts, x)
        whole.append(from_layout(torch.cat(parts, 1), layout_of(tokens), DEVICES))
    keys, values = whole
    y = pa.LucidSolve()(keys, values)
    parts, outs = TokenOrder.read(layout_of(tokens)).parts_of(tokens, DEVICES), []
    for part in parts:
        if part.device == dist.get_rank():
            end = part.first + part.tokens
            outs.append(pa.Softmax()(q[:, part.rows], keys[:, :end], y[:, :end]))
    return torch.cat(outs, 1)


def measured(run: Callable[[], Tensor]) -> tuple[dict, Tensor]:
    """Times and peaks of all processes, and this one's output."""
    found: dict = {}

    def timed() -> None:
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        found["out"] = run()
        found["cpu"], found["seconds"] = time.process_time() - cpu, time.perf_counter() - start

    found["peak"] = peak_of(timed, TorchLibrary())
    everyone: list = [None] * DEVICES
    out = found.pop("out")
    dist.all_gather_object(everyone, found)
    return {
        "seconds": max(each["seconds"] for each in everyone),
        "cpu": [round(each["cpu"], 2) for each in everyone],
        "peak": [int(each["peak"]) for each in everyone],
    }, out


def rows_of(tokens: int, mesh: DeviceMesh, *, compares: bool) -> list[dict]:
    """The measurements of one length."""
    q, k, v = parts_of(tokens, dist.get_rank())
    attn = context_parallel("lucid", mesh["cp"], layout=layout_of(tokens))
    gathered_bytes = (DEVICES - 1) * (k.nbytes + v.nbytes)
    sent = 2 * gathered_bytes  # k and y of the solve, then k and y around the ring.
    found, out = measured(lambda: attn(q, k, v))
    rows = [
        {"plan": "cyclic", "tokens": tokens, "layout": layout_of(tokens), "sent": sent, **found}
    ]
    if compares:
        found, other = measured(lambda: gathered(q, k, v, tokens))
        difference = (out - other).abs().max() / other.abs().max()
        dist.all_reduce(difference, dist.ReduceOp.MAX)
        rows.append({"plan": "gathered", "tokens": tokens, "sent": gathered_bytes, **found,
                     "difference": float(difference)})  # fmt: skip
    return rows


def work(rank: int, folder: str, lengths: list[int]) -> None:
    """One process."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", DEVICES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=DEVICES)
    mesh = init_device_mesh("cpu", (DEVICES,), mesh_dim_names=("cp",))
    with torch.no_grad():
        rows_of(2**13, mesh, compares=True)  # A first call, which loads modules, is not counted.
        rows = []
        for tokens in lengths:
            rows += rows_of(tokens, mesh, compares=tokens in COMPARED)
            if rank == 0:
                recorded.save(Path(folder) / "rows.json", {"rows": rows})
                print(rows[-1], file=sys.stderr, flush=True)
    dist.destroy_process_group()


def record(lengths: list[int]) -> dict:
    """All lengths."""
    os.environ.update(MALLOC_SETTINGS)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder, lengths), DEVICES)
        rows = recorded.load(Path(folder) / "rows.json")["rows"]
    cores = len(os.sched_getaffinity(0))
    return {"torch": torch.__version__, "cores": cores, "devices": DEVICES, "heads": HEADS,
            "width": WIDTH, "rows": rows}  # fmt: skip


def of_plan(saved, plan):
    """The rows of a plan, by the number of tokens."""
    return {row["tokens"]: row for row in saved["rows"] if row["plan"] == plan}


SHOWN = {
    "CPU seconds of a process": lambda row: f"{np.mean(row['cpu']):.2f}",
    "peak, MiB": lambda row: f"{max(row['peak']) / 2**20:.1f}",
    "sent by a process, MiB": lambda row: f"{row['sent'] / 2**20:.1f}",
    "largest difference": lambda row: f"{row['difference']:.1g}" if "difference" in row else "",
}


def measurements(saved):
    """Each column of a row, and that of gathered keys after a stroke."""
    whole, rows = of_plan(saved, "gathered"), []
    for tokens, row in of_plan(saved, "cyclic").items():
        both = [row, *([whole[tokens]] if tokens in whole else [])]
        cells = (" / ".join(filter(None, map(show, both))) or "–" for show in SHOWN.values())
        rows.append((f"{tokens:,}", f"`{row['layout']}`", *cells))
    return table(("tokens", "layout", *SHOWN), rows)


def draw(saved):
    """Time and memory."""
    figure, (times, memory) = panels(2, height=2.6)
    for plan, label in (("cyclic", "pipelined solve"), ("gathered", "all-gathered keys")):
        rows = of_plan(saved, plan)
        tokens, found = list(rows), rows.values()
        times.plot(tokens, [np.mean(r["cpu"]) for r in found], marker=".", label=label)
        memory.plot(tokens, [max(r["peak"]) / 2**20 for r in found], marker=".")
    for ax, what in ((times, "CPU seconds of a process"), (memory, "peak of a process (MiB)")):
        ax.set(xlabel="tokens", ylabel=what, xscale="log", yscale="log")
        at = sorted(of_plan(saved, "cyclic"))
        ax.set_xticks(at, [f"{n // 2**10}K" if n < 2**20 else "1M" for n in at])
        ax.minorticks_off()
    times.legend()
    return figure


if __name__ == "__main__":
    if "--draw" not in sys.argv:
        most = max([int(word) for word in sys.argv[1:] if word.isdigit()], default=max(LONGER))
        recorded.save(FILE, record([n for n in (*COMPARED, *LONGER) if n <= most]))
    saved = recorded.load(FILE)
    drawing.save("many_devices_lucid", draw, saved)
    PAGE.write_text(recorded.with_measured(PAGE, measurements(saved)), encoding="utf-8")
