"""Train the six models of `train_a_language_model.md`, save their losses, and draw them.

python docs/make_tutorial.py           train, save, draw, and update the page
python docs/make_tutorial.py --draw    draw what was saved, and update the page

The functions that train are the page's own: its blocks before the first training.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from textwrap import fill
from typing import Any

from recorded import captioned, shown, with_measured

DOCS = Path(__file__).parent
PAGE = DOCS / "train_a_language_model.md"
RECORD = DOCS / "measurements" / "tutorial" / "losses.json"
FIGURE = DOCS / "figures" / "tutorial.svg"

MECHANISMS = ("softmax", "lucid", "laser", "gated_delta", "ccq(gated_delta)", "gla")
WIDTH, STEPS = 64, 448
WRITER = "lucid"
"""The mechanism whose text sample is on the page."""
SMOOTH = 8
"""The number of steps that a point of a curve averages."""

LINE = 110
RANKS = (
    "One seed and so few steps are not enough to rank the mechanisms. The run shows that each of "
    "them can be trained in the same model without further code. `python docs/make_tutorial.py` "
    "repeats the run."
)


def functions() -> dict[str, Any]:
    """The definitions of the page before its first training."""
    section = PAGE.read_text(encoding="utf-8").partition("The mechanism is the only thing")[0]
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE):
        exec(block, names)
    return names


def trained(mechanism: str) -> dict[str, Any]:
    """Losses, seconds of one core, and a sample, of one mechanism."""
    import torch

    torch.set_num_threads(1)
    page = functions()
    model = page["make"](mechanism, WIDTH)
    start = time.process_time()
    losses = page["train"](model, STEPS)
    seconds = time.process_time() - start
    prompt = torch.tensor([[page["number"][c] for c in "def "]])
    generator = torch.Generator().manual_seed(0)
    drawn = model.generate(prompt, 160, temperature=0.8, top_p=0.9, generator=generator)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds_of_one_core": round(seconds, 1),
        "held_out": round(page["test"](model), 3),
        "losses": [round(value, 4) for value in losses],
        "sample": "def " + "".join(page["alphabet"][i] for i in drawn[0].tolist()),
    }


def record() -> dict[str, Any]:
    """All mechanisms, two at a time."""
    import torch

    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        runs = dict(zip(MECHANISMS, pool.map(trained, MECHANISMS), strict=True))
    return {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "commit": commit(),
        "characters": len(functions()["text"]),
        "width": WIDTH,
        "steps": STEPS,
        "runs": runs,
    }


def commit() -> str:
    """The commit of the text, which has to be that of the files."""
    git = ["git", "-C", str(DOCS)]
    changed = subprocess.check_output([*git, "status", "--porcelain", "../precondattn"], text=True)
    if changed:
        raise SystemExit(f"the text differs from the commit:\n{changed}")
    return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()


def measured(saved: dict[str, Any]) -> str:
    """The part of the page that describes the saved run."""
    seconds = sum(run["seconds_of_one_core"] for run in saved["runs"].values())
    about = (
        f"All six models learn at about the same rate. Each was trained for {saved['steps']} steps "
        f"at width {saved['width']}, and each point of a curve is the mean of {SMOOTH} steps. The "
        f"text had {saved['characters']:,} characters (commit `{saved['commit'][:7]}`). The last "
        f"column of the table is the CPU time of training, {seconds:.0f} s in all. Two models were "
        f"trained at a time, with one thread each."
    )
    last = [sum(run["losses"][-SMOOTH:]) / SMOOTH for run in saved["runs"].values()]
    finding = (
        f"Training losses of {len(last)} mechanisms fall together, to between {min(last):.2f} "
        f"and {max(last):.2f} nats after {saved['steps']} steps."
    )
    lines = [
        captioned("figures/tutorial.svg", finding),
        "",
        fill(about, LINE),
        "",
        "| mechanism | parameters | held-out loss (nats) | seconds of one core |",
        "|---|---:|---:|---:|",
    ]
    for mechanism, run in saved["runs"].items():
        cells = (
            f"{run['parameters']:,}",
            f"{run['held_out']:.2f}",
            f"{run['seconds_of_one_core']:.0f}",
        )
        lines.append(f"| `{mechanism}` | {' | '.join(cells)} |")
    sample = saved["runs"][WRITER]["sample"].split("\n")
    lines += [
        "",
        fill(RANKS, LINE),
        "",
        fill(f"The model with `{WRITER}` then wrote this, at temperature 0.8 and top-p 0.9:", LINE),
        "",
        "```text",
        *(line.rstrip() for line in sample),
        "```",
    ]
    return "\n".join(lines)


def page(saved: dict[str, Any]) -> str:
    """The page, with the saved run."""
    return with_measured(PAGE, measured(saved))


def draw(saved: dict[str, Any]) -> None:
    """One curve for each mechanism."""
    import matplotlib as mpl
    import numpy as np
    from make_figures import STYLE, panels

    with mpl.rc_context(STYLE):
        figure, (ax,) = panels(1, height=2.8)
        colours = mpl.color_sequences["tab10"]
        for colour, (mechanism, run) in zip(colours, saved["runs"].items(), strict=False):
            means = np.reshape(run["losses"], (-1, SMOOTH)).mean(1)
            steps = SMOOTH * (np.arange(len(means)) + 0.5)
            ax.plot(steps, means, label=mechanism, color=colour, linewidth=1.2)
        ax.set(xlabel="step", ylabel="training loss (nats)")
        ax.legend()
        figure.savefig(FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    shown(RECORD, record, draw, PAGE, page)
