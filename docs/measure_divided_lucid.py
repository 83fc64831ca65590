"""Measure LUCID over long sequences on 8 processes: its pipelined solve, and all-gathered keys.

    python docs/measure_divided_lucid.py             16K to 64K tokens in both ways, then more
    python docs/measure_divided_lucid.py 65536       no more than this
    python docs/measure_divided_lucid.py --draw      update the page from what was saved

`cyclic`      `context_parallel("lucid", mesh, layout="cyclic[block=B]")`, B of `BLOCKS`
`gathered`    every process gathers all keys and values, solves all tokens, and attends from its own

Processes share the cores, so the time of the slowest process does not predict the time on as many
machines. The CPU seconds of each process do, since they do not include waiting.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from recorded import captioned, load, save, shown, with_measured
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import precondattn as pa
from precondattn.parallel.layouts import TokenOrder, from_layout
from precondattn.parallel.torch import context_parallel
from precondattn_conformance.libraries import TorchLibrary
from precondattn_conformance.memory import MALLOC_SETTINGS, peak_of

DOCS = Path(__file__).parent
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
    own = [
        part
        for part in TokenOrder.read(layout_of(tokens)).parts_of(tokens, DEVICES)
        if part.device == dist.get_rank()
    ]
    ends = [part.first + part.tokens for part in own]
    attend = pa.Softmax()
    outs = [
        attend(q[:, part.rows], keys[:, :end], y[:, :end])
        for part, end in zip(own, ends, strict=True)
    ]
    return torch.cat(outs, 1)


def measured(run: Callable[[], Tensor]) -> tuple[dict[str, Any], Tensor]:
    """Times and peaks of all processes, and this one's output."""
    found: dict[str, Any] = {}

    def timed() -> None:
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        found["out"] = run()
        found["cpu"], found["seconds"] = time.process_time() - cpu, time.perf_counter() - start

    found["peak"] = peak_of(timed, TorchLibrary())
    everyone: list[Any] = [None] * DEVICES
    out = found.pop("out")
    dist.all_gather_object(everyone, found)
    return {
        "seconds": max(each["seconds"] for each in everyone),
        "cpu": [round(each["cpu"], 2) for each in everyone],
        "peak": [int(each["peak"]) for each in everyone],
    }, out


def rows_of(tokens: int, mesh: DeviceMesh, *, compares: bool) -> list[dict[str, Any]]:
    """The measurements of one length."""
    q, k, v = parts_of(tokens, dist.get_rank())
    attn = context_parallel("lucid", mesh["cp"], layout=layout_of(tokens))
    sent = sum(attn.explain(q, k, v).bytes_sent.values())
    found, out = measured(lambda: attn(q, k, v))
    rows = [
        {"plan": "cyclic", "tokens": tokens, "layout": layout_of(tokens), "sent": sent, **found}
    ]
    if compares:
        found, other = measured(lambda: gathered(q, k, v, tokens))
        difference = (out - other).abs().max() / other.abs().max()
        dist.all_reduce(difference, dist.ReduceOp.MAX)
        sent = (DEVICES - 1) * (k.nbytes + v.nbytes)
        rows.append({"plan": "gathered", "tokens": tokens, "sent": sent, **found,
                     "difference": float(difference)})  # fmt: skip
    return rows


def work(rank: int, folder: str, lengths: tuple[int, ...]) -> None:
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
                save(Path(folder) / "rows.json", {"rows": rows})
                print(rows[-1], file=sys.stderr, flush=True)
    dist.destroy_process_group()


def record(lengths: tuple[int, ...]) -> dict[str, Any]:
    """All lengths."""
    os.environ.update(MALLOC_SETTINGS)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder, lengths), DEVICES)
        rows = load(Path(folder) / "rows.json")["rows"]
    cores = len(os.sched_getaffinity(0))
    return {"torch": torch.__version__, "cores": cores, "devices": DEVICES, "heads": HEADS,
            "width": WIDTH, "rows": rows}  # fmt: skip


def mean(numbers: list[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def of_plan(saved: dict[str, Any], plan: str) -> dict[int, dict[str, Any]]:
    """The rows of a plan, by the number of tokens."""
    return {row["tokens"]: row for row in saved["rows"] if row["plan"] == plan}


def estimated(saved: dict[str, Any], tokens: int) -> tuple[float, float]:
    """CPU seconds and peak bytes of a process: pairs grow as N², its memory as N."""
    rows = of_plan(saved, "cyclic")
    before, longest = (rows[n] for n in sorted(rows)[-2:])
    more = tokens - longest["tokens"]
    each = (max(longest["peak"]) - max(before["peak"])) / (longest["tokens"] - before["tokens"])
    times = mean(longest["cpu"]) * (tokens / longest["tokens"]) ** 2
    return times, max(longest["peak"]) + each * more


def measurements(saved: dict[str, Any]) -> str:
    """The table, and the conclusions."""
    cyclic, whole = of_plan(saved, "cyclic"), of_plan(saved, "gathered")
    lines = [
        f"{saved['devices']} processes of one thread on {saved['cores']} cores that other work used too, "  # noqa: E501
        f"PyTorch {saved['torch']} with gloo, float32, {saved['heads']} head of {saved['width']} channels, "  # noqa: E501
        "forward. CPU seconds are the mean over processes. The peak is the largest of all "
        "processes, without the memory before the call (libraries and inputs).",
        "",
        "| tokens | layout | CPU seconds of a process | gathered | peak, MiB | gathered "
        "| sent by a process, MiB | gathered | largest difference |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for tokens, row in cyclic.items():
        other = whole.get(tokens)
        cells = [f"{tokens:,}", f"`{row['layout']}`"]
        for value in (
            lambda r: f"{mean(r['cpu']):.2f}",
            lambda r: f"{max(r['peak']) / 2**20:.1f}",
            lambda r: f"{r['sent'] / 2**20:.1f}",
        ):
            cells += [value(row), "–" if other is None else value(other)]
        cells.append("–" if other is None else f"{other['difference']:.1g}")
        lines.append(f"| {' | '.join(cells)} |")
    longest = max(cyclic)
    row = cyclic[longest]
    both = max(whole)
    peaks = [max(run["peak"]) / 2**20 for run in (cyclic[both], whole[both])]
    took = [mean(run["cpu"]) for run in (cyclic[both], whole[both])]
    finding = (
        f"The pipelined solve takes less time and memory than gathered keys. At {both:,} tokens a "
        f"process takes {took[0]:.2f} s and {peaks[0]:.1f} MiB, not {took[1]:.2f} s and "
        f"{peaks[1]:.1f} MiB."
    )
    lines += ["", captioned("figures/many_devices_lucid.svg", finding), "",
              f"The call of {longest:,} tokens took {row['seconds']:,.0f} s on these cores, in "
              f"which the processes used {math.fsum(row['cpu']):,.0f} s of CPU time."]  # fmt: skip
    for tokens in saved.get("alone", []):
        lines += ["", f"{tokens:,} tokens were measured in a separate run on the same machine."]
    if longest < LONGER[-1]:
        times, peak = estimated(saved, LONGER[-1])
        lines += ["", f"**A million tokens were not run here.** From the two longest calls, "
                  f"{LONGER[-1]:,} tokens are estimated to take {times:,.0f} CPU seconds and "
                  f"{peak / 2**20:,.0f} MiB of each process."]  # fmt: skip
    return "\n".join(lines)


def draw(saved: dict[str, Any]) -> None:
    """One figure: time and memory."""
    import matplotlib as mpl
    from drawing import STYLE, panels

    with mpl.rc_context(STYLE):
        figure, (times, memory) = panels(2, height=2.6)
        for plan, label in (("cyclic", "pipelined solve"), ("gathered", "all-gathered keys")):
            rows = of_plan(saved, plan)
            tokens, found = list(rows), rows.values()
            times.plot(tokens, [mean(r["cpu"]) for r in found], marker=".", label=label)
            memory.plot(tokens, [max(r["peak"]) / 2**20 for r in found], marker=".")
        for ax, what in ((times, "CPU seconds of a process"), (memory, "peak of a process (MiB)")):
            ax.set(xlabel="tokens", ylabel=what, xscale="log", yscale="log")
            ticks = sorted(of_plan(saved, "cyclic"))
            ax.set_xticks(ticks, [f"{n // 2**10}K" if n < 2**20 else "1M" for n in ticks])
            ax.minorticks_off()
        times.legend()
        figure.savefig(DOCS / "figures" / "many_devices_lucid.svg", metadata={"Date": None})


def page(saved: dict[str, Any]) -> str:
    """The page, with the saved run."""
    return with_measured(PAGE, measurements(saved))


if __name__ == "__main__":
    most = max([int(word) for word in sys.argv[1:] if word.isdigit()], default=max(LONGER))
    lengths = tuple(tokens for tokens in (*COMPARED, *LONGER) if tokens <= most)
    shown(FILE, lambda: record(lengths), draw, PAGE, page)
