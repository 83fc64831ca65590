"""Draw the figure of `pytest_benchmark.md` from saved runs, and show their tables on the page.

python docs/make_pytest_benchmark.py FILE …    take these files of pytest-benchmark, then the rest
python docs/make_pytest_benchmark.py           draw the committed runs, and update the page
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from recorded import with_measured

DOCS = Path(__file__).parent
PAGE = DOCS / "pytest_benchmark.md"
FOLDER = DOCS / "measurements" / "pytest_benchmark"
FIGURE = DOCS / "figures" / "pytest_benchmark.svg"

PLAIN = "sdpa"
LABELS = {
    ("torch", "default"): "precondattn in PyTorch",
    ("jax", "default"): "precondattn in JAX",
    ("jax", "xla"): "JAX's own softmax (xla)",
}
"""The curves, by library and backend."""

Curves = dict[str, dict[tuple[str, str], dict[int, float]]]
"""By mechanism, then library and backend: the time over SDPA's, at each number of tokens."""


def files() -> list[Path]:
    """The committed runs, in order."""
    return sorted(FOLDER.glob("*.json"))


def take(paths: list[Path]) -> None:
    """Commit files of pytest-benchmark, without the host's name and the flags of its processor."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in files():
        old.unlink()
    for number, path in enumerate(paths, 1):
        run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        machine = run["machine_info"]
        kept = {"python_version": machine["python_version"], "precondattn": machine["precondattn"]}
        content = {**run, "machine_info": kept, "commit_info": {}}
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (FOLDER / f"{number:04}_cpu.json").write_text(text + "\n", encoding="utf-8")


def compared(paths: list[Path], *options: str) -> str:
    """What `pytest-benchmark compare` prints of some runs, without its legend."""
    command = [sys.executable, "-m", "pytest_benchmark", "--storage", str(FOLDER), "compare"]
    numbers = [path.name[:4] for path in paths]
    done = subprocess.run(
        [*command, *numbers, *options],
        cwd=FOLDER,  # Elsewhere pytest-benchmark imports the `conftest.py` of the folder.
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.partition("Legend:")[0].strip("\n").splitlines()
    return "\n".join(line.rstrip() for line in lines)


def curves() -> Curves:
    """The median time of each row over that of SDPA in its group; of several runs, the median."""
    medians: dict[tuple[str, str, str, int], list[float]] = defaultdict(list)
    for path in files():
        for row in json.loads(path.read_text(encoding="utf-8"))["benchmarks"]:
            p = row["params"]
            tokens = int(p["sizes"].partition(",")[0].removeprefix("t="))
            key = (p["mechanism"], p["library"], p["backend"], tokens)
            medians[key].append(row["stats"]["median"])
    found: Curves = defaultdict(lambda: defaultdict(dict))
    for (mechanism, library, backend, tokens), seconds in sorted(medians.items()):
        if (library, backend) in LABELS:
            plain = medians[mechanism, "torch", PLAIN, tokens]
            ratios = [a / b for a, b in zip(seconds, plain, strict=True)]
            found[mechanism][library, backend][tokens] = median(ratios)
    return found


def draw(found: Curves) -> None:
    """A panel for each mechanism."""
    import matplotlib as mpl
    from drawing import BLUE, GREEN, INK, ORANGE, STYLE, panels

    colours = dict(zip(LABELS, (BLUE, ORANGE, GREEN), strict=True))
    with mpl.rc_context(STYLE):
        figure, axes = panels(2, height=2.6)
        for ax, mechanism in zip(axes, ("softmax", "lucid"), strict=True):
            for each, label in LABELS.items():
                points = found[mechanism][each]
                style = "--" if each[1] == "xla" else "-"
                ax.plot(*zip(*points.items(), strict=True), style, marker=".", color=colours[each],
                        label=label)  # fmt: skip
            ticks = sorted(points)
            ax.axhline(1.0, color=INK, linewidth=0.8)
            ax.set(title=mechanism, xlabel="tokens", xscale="log", yscale="log")
            ax.set_xticks(ticks, [f"{tokens:,}" for tokens in ticks])
            ax.minorticks_off()
            marks = [1, 2, 4, 8]
            ax.set_yticks(marks, [f"{mark:g}" for mark in marks])
            ax.set_ylim(0.8, 14)
        axes[0].set_ylabel("time / SDPA's (PyTorch)")
        axes[0].legend(fontsize=7)
        figure.savefig(FIGURE, metadata={"Date": None})


def finding(found: Curves) -> str:
    """What the figure shows, in words."""

    def times(mechanism: str, library: str, backend: str = "default") -> str:
        ratios = found[mechanism][library, backend].values()
        return f"{min(ratios):.1f} to {max(ratios):.1f} times"

    tokens = sorted(found["lucid"]["torch", "default"])
    return (
        f"Time over that of PyTorch's SDPA on one thread of a CPU, from {tokens[0]:,} to "
        f"{tokens[-1]:,} tokens: softmax takes {times('softmax', 'torch')} SDPA's time in PyTorch "
        f"and {times('softmax', 'jax')} in JAX; JAX's own xla takes "
        f"{times('softmax', 'jax', 'xla')}; LUCID takes {times('lucid', 'torch')} in "
        f"PyTorch and {times('lucid', 'jax')} in JAX."
    )


def measured() -> str:
    """The tables and the figure."""
    first, *_, last = files()
    described = json.loads(first.read_text(encoding="utf-8"))["machine_info"]["precondattn"]
    versions = described["versions"]
    one = compared([first], "--columns=median,rounds", "--name=short", "-k", "4096")
    two = compared([first, last], "--between=median", "--name=short", "-k", "4096 and lucid")
    where = f"{described['processor']}, PyTorch {versions['torch']}, JAX {versions['jax']}"
    return f"""It prints a table for each group, the fastest row first. Two of the six:

```text
{one}
```

`sdpa(softmax)` and `xla(softmax)` are peers that compute softmax attention. `naive_lucid`
computes LUCID as its paper writes it.

The same file was run again some minutes later. `--between` puts two runs side by side:

```console
$ pytest-benchmark compare 0001 {last.name[:4]} --between=median --name=short -k '4096 and lucid'
```

```text
{two}
```

![{finding(curves())}](figures/pytest_benchmark.svg)

*Processor time on one thread ({where}) over that of `sdpa` in the same
group; medians of {len(files())} runs. Above the grey line a row takes longer than PyTorch's SDPA,
which computes softmax attention. `python docs/make_pytest_benchmark.py` draws the saved files.*"""


def page() -> str:
    """The page, with the committed runs."""
    return with_measured(PAGE, measured())


if __name__ == "__main__":
    if sys.argv[1:]:
        take([Path(each) for each in sys.argv[1:]])
    draw(curves())
    PAGE.write_text(page(), encoding="utf-8")
