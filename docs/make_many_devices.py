"""Simulate sequences divided among 8 to 1,024 devices, save the times, draw them, update the page.

    python docs/make_many_devices.py           simulate, save, draw, and update the page (minutes)
    python docs/make_many_devices.py --draw    draw what was saved, and update the page

The model is in `many_devices_model.py`; `measure_many_devices.py` compares CPUs with such a model.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from many_devices_model import (
    LAYOUTS,
    Constants,
    by_heads,
    closed_idle_share,
    gathered,
    idle_share,
    pipelined,
    ring,
    scan,
)
from recorded import captioned, load, shown, with_measured

DOCS = Path(__file__).parent
PAGE = DOCS / "many_devices_simulation.md"
RECORD = DOCS / "measurements" / "many_devices" / "simulation.json"
CPU = RECORD.with_name("cpu.json")
FIGURES = DOCS / "figures"

TOKENS, DEVICES = (2**17, 2**20, 2**22, 2**24), (8, 64, 256, 1024)
BLOCKS = tuple(2**i for i in range(7, 15))
MOST_BLOCKS = 2**14
"""More blocks are not simulated."""
SHOWN = (2**20, 64)
FOUND_IDLE = (
    "Contiguous layouts leave a third to a half of the work idle, zigzag none. Cyclic ones idle "
    "the more the larger the block and the more devices there are, up to half with blocks of "
    "1,024 tokens."
)
FOUND_TIME = (
    "The pipelined solves of LUCID get faster up to 256 devices with 1M tokens and up to 1,024 "
    "with 16M, in a cyclic layout within 1.7 times softmax's time on up to 256 devices. With "
    "gathered keys LUCID hardly gains from more than 64 devices."
)
FOUND_BLOCK = (
    "With 1M tokens the best blocks have 1,024 or 2,048 tokens on 64 devices and more, and much "
    "smaller ones take more than twice as long on 256. On 8 devices the size hardly matters. "
    "With 16M tokens blocks of 1,024 or 2,048 tokens are best, too."
)
FOUND_WHERE = (
    "1M tokens on 64 devices. Left, the first device of a contiguous layout idles nearly all of "
    "the time, each of a zigzag layout a third, and those of a cyclic layout 5 to 16 %. Right, "
    "a contiguous layout idles nearly only in the last tenth of the blocks, a zigzag one most "
    "there."
)
ASSUMED = {
    "flops": "FLOP/s of products of bfloat16: data sheet of the H100 SXM, without sparsity",
    "share": "share of `flops` that attention and the solve reach: assumed",
    "recurrent_share": "share of `flops` that the gated delta rule reaches: assumed",
    "tiles": "multiprocessors; with fewer tiles (128 rows of a head), some are idle",
    "near": "bytes/s in each direction, up to 8 devices: data sheet, NVLink of 900 GB/s both ways",
    "far": "bytes/s in each direction, more devices: InfiniBand, 400 Gbit/s for each device",
    "link_share": "share of these bytes/s that is reached: assumed",
    "message": "latency of a message in seconds, for each hop: assumed",
    "launch": "seconds to launch a kernel: assumed",
    "heads": "query heads, batch 1",
    "kv_heads": "key/value heads",
    "width": "channels of keys and of values",
    "backward_work": "FLOPs of the gradient / of the forward: five products for two",
    "backward_bytes": "bytes of the gradient / of the forward: keys, values, float32 gradients",
    "chunk": "tokens of a chunk of the recurrence",
}


def plans(c: Constants, tokens: int, devices: int) -> dict[str, Any]:
    """Seconds forward, and of forward and gradient; None where a plan is impossible."""

    def both(run: Any, *options: Any) -> list[float] | None:
        forward = run(c, tokens, devices, *options)
        return forward and [forward, forward + run(c, tokens, devices, *options, backward=True)]

    return {
        "softmax, ring contiguous": both(ring, "contiguous"),
        "softmax, ring zigzag": both(ring, "zigzag"),
        "softmax, heads": both(by_heads),
        "gated delta, scan": both(scan),
        "LUCID, heads": both(by_heads, True),
        "LUCID, all-gather": both(gathered),
    }


def solves(c: Constants, tokens: int, devices: int) -> dict[str, Any]:
    """Each layout: seconds forward of each block size, and more of the best one."""
    found: dict[str, Any] = {}
    for layout in LAYOUTS:
        parts = devices * (2 if layout == "zigzag" else 1)
        sizes = [b for b in BLOCKS if tokens // MOST_BLOCKS <= b <= tokens // parts]
        forward = {str(b): pipelined(c, tokens, devices, layout, b) for b in sizes}
        if forward:
            best = min(forward, key=lambda b: forward[b].seconds)
            one = forward[best]
            back = pipelined(c, tokens, devices, layout, int(best), backward=True)
            found[layout] = {
                "seconds": {b: run.seconds for b, run in forward.items()},
                "best": int(best),
                "busy": one.busy,
                "step": one.seconds + back.seconds,
            }
            if (tokens, devices) == SHOWN:
                found[layout]["idle_by_device"] = one.idle_by_device.tolist()
                found[layout]["idle_over_time"] = one.idle_over_time.tolist()
    return found


def row(c: Constants, tokens: int, devices: int) -> dict[str, Any]:
    """All plans of one size."""
    return {"tokens": tokens, "devices": devices, "plans": plans(c, tokens, devices),
            "solves": solves(c, tokens, devices)}  # fmt: skip


def record() -> dict[str, Any]:
    """All sizes."""
    c = Constants()
    return {"constants": asdict(c), "rows": [row(c, n, p) for n in TOKENS for p in DEVICES]}


def name(tokens: int) -> str:
    return f"{tokens // 2**20}M" if tokens >= 2**20 else f"{tokens // 2**10}K"


def duration(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:,.4g} s"


def table(headings: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in [headings, ["---"] * len(headings), *rows]]


def measured(saved: dict[str, Any], cpu: dict[str, Any]) -> str:
    """The tables and figures."""
    lines = ["## What is assumed", ""]
    lines += table(["constant", "value", "what it is, and its source"], [
        [f"`{key}`", f"{saved['constants'][key]:.4g}", what] for key, what in ASSUMED.items()
    ])  # fmt: skip
    lines += ["", "## Idle work by layout", "",
              "Counted pairs of causal attention, at 1M tokens: 1 − mean / maximum of devices.", "",
              captioned("figures/many_devices_idle.svg", FOUND_IDLE), ""]  # fmt: skip
    layouts = [("contiguous", 1), ("zigzag", 1), ("cyclic", 128), ("cyclic", 512), ("cyclic", 1024)]
    lines += table(
        ["devices", *(f"`cyclic[block={b}]`" if b > 1 else f"`{k}`" for k, b in layouts)],
        [[str(p), *(f"{100 * idle_share(k, 2**20, p, b):.1f} %" for k, b in layouts)]
         for p in DEVICES],
    )  # fmt: skip
    lines += ["", "## Simulated time of one layer's attention, forward / training step", "",
              captioned("figures/many_devices_time.svg", FOUND_TIME), ""]  # fmt: skip
    fixed = list(saved["rows"][0]["plans"])
    cells = []
    for found in saved["rows"]:
        times = [found["plans"][plan] for plan in fixed]
        for layout in LAYOUTS:
            run = found["solves"].get(layout)
            times.append(run and [run["seconds"][str(run["best"])], run["step"]])
        shown = [f"{duration(t[0])} / {duration(t[1])}" if t else "–" for t in times]
        cells.append([name(found["tokens"]), str(found["devices"]), *shown])
    lines += table(["tokens", "devices", *fixed, *(f"LUCID, {k}" for k in LAYOUTS)], cells)
    lines += ["", "## Best block size, and the share of time that devices compute", "",
              captioned("figures/many_devices_block.svg", FOUND_BLOCK), ""]  # fmt: skip
    cells = []
    for found in saved["rows"]:
        runs = [found["solves"].get(layout) for layout in LAYOUTS]
        shown = [f"{r['best']:,}, {100 * r['busy']:.0f} %" if r else "–" for r in runs]
        cells.append([name(found["tokens"]), str(found["devices"]), *shown])
    lines += table(["tokens", "devices", *LAYOUTS], cells)
    lines += ["", "## Where the pipelined solve idles", "",
              captioned("figures/many_devices_where.svg", FOUND_WHERE), "",
              "## The same kind of model beside a measured run", "",
              f"Softmax and the gated delta rule, {cpu['tokens']:,} tokens, {cpu['heads']} heads of "  # noqa: E501
              f"{cpu['width']}, forward, float32, PyTorch {cpu['torch']} with gloo, processes on "
              f"{cpu['cores']} cores that others used too. The model's constants were measured "
              "in the same run (`docs/measure_many_devices.py`).", ""]  # fmt: skip
    lines += table(["plan", "processes", "predicted", "measured", "measured / predicted"], [
        [r["plan"], str(r["devices"]), duration(r["predicted"]), duration(r["measured"]),
         f"{r['measured'] / r['predicted']:.2f}"] for r in cpu["rows"]
    ])  # fmt: skip
    return "\n".join(lines)


def page(saved: dict[str, Any]) -> str:
    """The page, with the saved simulation."""
    return with_measured(PAGE, measured(saved, load(CPU)))


def draw(saved: dict[str, Any]) -> None:
    """Four figures."""
    import matplotlib as mpl
    from make_figures import STYLE, panels

    rows = {(r["tokens"], r["devices"]): r for r in saved["rows"]}
    with mpl.rc_context(STYLE):
        figure, (ax,) = panels(1, height=2.6)
        for layout, block in [("contiguous", 1), ("zigzag", 1), ("cyclic", 128), ("cyclic", 1024)]:
            label = f"cyclic[block={block}]" if block > 1 else layout
            devices = [2**i for i in range(1, 11)]
            shares = [100 * closed_idle_share(layout, 2**20, p, block) for p in devices]
            ax.plot(devices, shares, marker=".", label=label)
        ax.set(xlabel="devices", ylabel="idle work (%)", xscale="log")
        ax.set_xticks(devices, map(str, devices))
        ax.minorticks_off()
        ax.legend()
        figure.savefig(FIGURES / "many_devices_idle.svg", metadata={"Date": None})

        figure, axes = panels(2, height=3.6)
        for ax, tokens in zip(axes, (2**20, 2**24), strict=True):
            curves = {plan: {p: rows[tokens, p]["plans"][plan] for p in DEVICES}
                      for plan in ("softmax, ring zigzag", "LUCID, all-gather")}  # fmt: skip
            for plan, times in curves.items():
                ax.plot(DEVICES, [times[p][0] for p in DEVICES], marker=".", label=plan)
            for layout in LAYOUTS:
                runs = {p: rows[tokens, p]["solves"].get(layout) for p in DEVICES}
                points = {p: r["seconds"][str(r["best"])] for p, r in runs.items() if r}
                ax.plot(*zip(*points.items(), strict=True), marker=".", label=f"LUCID, {layout}")
            ax.set(xlabel="devices", xscale="log", yscale="log", title=f"{name(tokens)} tokens")
            ax.set_xticks(DEVICES, map(str, DEVICES))
            ax.minorticks_off()
        axes[0].set_ylabel("seconds forward, simulated")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.savefig(FIGURES / "many_devices_time.svg", metadata={"Date": None})

        figure, axes = panels(2, height=2.8)
        for ax, tokens in zip(axes, (2**20, 2**24), strict=True):
            for p in DEVICES:
                times = rows[tokens, p]["solves"]["cyclic"]["seconds"]
                least = min(times.values())
                ax.plot([int(b) for b in times], [t / least for t in times.values()], marker=".",
                        label=f"{p} devices")  # fmt: skip
            ax.set(
                xlabel="block, cyclic", xscale="log", title=f"{name(tokens)} tokens", ylim=(0.95, 3)
            )
            ax.set_xticks(BLOCKS[::2], map(str, BLOCKS[::2]))
            ax.minorticks_off()
        axes[0].set_ylabel("time / that of the best block")
        axes[0].legend()
        figure.savefig(FIGURES / "many_devices_block.svg", metadata={"Date": None})

        figure, axes = panels(2, height=2.6)
        for layout, run in rows[SHOWN]["solves"].items():
            axes[0].plot([100 * x for x in run["idle_by_device"]], label=layout)
            axes[1].plot(range(5, 100, 10), [100 * x for x in run["idle_over_time"]], marker=".")
        axes[0].set(xlabel="device", ylabel="idle (% of the time)", ylim=(0, 100))
        axes[1].set(xlabel="solved blocks (%)", ylabel="idle in each tenth (% of time)")
        axes[0].legend()
        figure.savefig(FIGURES / "many_devices_where.svg", metadata={"Date": None})


if __name__ == "__main__":
    shown(RECORD, record, draw, PAGE, page)
