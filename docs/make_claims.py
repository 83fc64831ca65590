"""Try the claims of the papers: run the experiments, save, draw, and update their pages.

python docs/make_claims.py                        all
python docs/make_claims.py lucid_retrieval        one
python docs/make_claims.py --draw                 draw what was saved, and update the pages

Experiments that train save each finished training in `_build/claims`, and go on from there.

An experiment is a module of `claims`. Its page is `claims/NAME.md`, its results are
`measurements/claims/NAME.json`, its figure is `figures/claims_NAME.svg`.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from types import ModuleType
from typing import Any

import matplotlib as mpl
import numpy as np
from claims.claim import DOCUMENTS
from make_figures import STYLE
from recorded import captioned, load, save, with_measured

import precondattn as pa

DOCS = Path(__file__).parent
FRONT = DOCS / "claims" / "index.md"
NAMES = (
    "lucid_retrieval",
    "lucid_conditioning",
    "lucid_key_gradients",
    "laser_gradients",
    "laser_maximum",
    "ccq_margin",
    "ccq_mesa",
    "row_norm_conditioning",
    "row_scaling",
    "overheads",
    "sharp_softmax",
    "state_tracking",
    "row_norm_digits",
    "row_norm_variants",
    "lucid_needles",
    "lucid_length",
    "ccq_recall",
    "ccq_language",
    "ccq_alignment",
    "laser_training",
    "laser_vision",
    "differential_noise",
)
LINE = 110


def experiment(name: str) -> ModuleType:
    """The module of an experiment."""
    return importlib.import_module(f"claims.{name}")


def page(name: str) -> Path:
    return DOCS / "claims" / f"{name}.md"


def record(name: str) -> Path:
    return DOCS / "measurements" / "claims" / f"{name}.json"


def figure(name: str) -> Path:
    return DOCS / "figures" / f"claims_{name}.svg"


def run(name: str) -> dict[str, Any]:
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


def measured(name: str, saved: dict[str, Any]) -> str:
    """Verdict, figure and table of a page."""
    module, results = experiment(name), saved["results"]
    library = f"PyTorch {saved['torch']}" if "torch" in saved else f"NumPy {saved['numpy']}"
    about = (
        f"`python docs/make_claims.py {name}` made these numbers in "
        f"{saved['seconds_of_one_core']:.0f} seconds of one core, with {library}."
    )
    return "\n".join(
        [
            fill(f"**Verdict: {module.CLAIM.verdict}.** {module.CLAIM.because}", LINE),
            "",
            captioned(f"../figures/claims_{name}.svg", module.ALT),
            "",
            module.rows(results),
            "",
            fill(about, LINE),
        ]
    )


def front() -> str:
    """The table of all verdicts, and what the documents are."""
    lines = ["| claim | source | verdict |", "|---|---|---|"]
    for name in NAMES:
        claim = experiment(name).CLAIM
        lines.append(f"| [{claim.says}]({name}.md) | {claim.source} | **{claim.verdict}** |")
    lines += ["", "The documents:", "", *(f"* **{x}**: {text}." for x, text in DOCUMENTS.items())]
    return "\n".join(lines)


def main(names: list[str], only_draw: bool) -> None:
    for name in names or NAMES:
        if not only_draw:
            save(record(name), run(name))
        saved = load(record(name))
        with mpl.rc_context(STYLE):
            experiment(name).draw(saved["results"]).savefig(figure(name), metadata={"Date": None})
        page(name).write_text(with_measured(page(name), measured(name, saved)), encoding="utf-8")
    FRONT.write_text(with_measured(FRONT, front()), encoding="utf-8")


if __name__ == "__main__":
    main([x for x in sys.argv[1:] if x != "--draw"], "--draw" in sys.argv)
