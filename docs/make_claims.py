"""Try the claims of the papers: run the experiments, save, draw, and update the tables.

python docs/make_claims.py                        all
python docs/make_claims.py lucid_retrieval        one
python docs/make_claims.py --draw                 draw what was saved, and update the pages

Experiments that train save each finished training in `_build/claims`, and go on from there; those
on digits need scikit-learn, of the extra `claims`.

An experiment is a module of `claims`, with `run`, `rows`, `draw`, and for a test `SMALL`.
Its results are `measurements/claims/NAME.json`, its figure is `figures/claims_NAME.svg`, and its
section, on the page of the paper it is about, shows this figure. Verdicts are written by hand, in
the section and in `claims/index.md`.
"""

import importlib
import os
import platform
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path

import drawing
import numpy as np
from recorded import DOCS, load, save, with_measured

import precondattn as pa

FIGURE = re.compile(r"^:::\{figure\} \.\./figures/claims_(\w+)\.svg$", re.M)
SECTIONS = {
    path: FIGURE.findall(path.read_text(encoding="utf-8"))
    for path in sorted((DOCS / "claims").glob("*.md"))
}
"""The experiments of each page, in the order of its sections."""
NAMES = [name for names in SECTIONS.values() for name in names]


def experiment(name: str):
    """The module of an experiment."""
    return importlib.import_module(f"claims.{name}")


def record(name: str) -> Path:
    return DOCS / "measurements" / "claims" / f"{name}.json"


def run(name: str) -> dict:
    """The results of an experiment, with what is needed to repeat it."""
    start = time.process_time()
    results = experiment(name).run()
    seconds = time.process_time() - start
    if "runs" in results:  # Some runs may be from an earlier, interrupted call.
        seconds = sum(training["seconds"] for training in results["runs"].values())
    return {
        "precondattn": pa.__version__,
        "numpy": np.__version__,
        **({"torch": version("torch")} if "runs" in results else {}),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "seconds_of_one_core": round(seconds, 1),
        "results": results,
    }


def page(path: Path) -> str:
    """The text of a page with the tables of its experiments."""
    rows = (experiment(name).rows(load(record(name))["results"]) for name in SECTIONS[path])
    return with_measured(path, *rows)


def main(names: list[str], only_draw: bool) -> None:
    for name in names or NAMES:
        if not only_draw:
            save(record(name), run(name))
        drawing.save(f"claims_{name}", experiment(name).draw, load(record(name))["results"])
    for path in SECTIONS:
        path.write_text(page(path), encoding="utf-8")


if __name__ == "__main__":
    main([x for x in sys.argv[1:] if x != "--draw"], "--draw" in sys.argv)
