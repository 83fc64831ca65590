"""The time that a mechanism adds to its base: the papers' figures, and measured ones.

Nothing is timed here. The ratios are those of the saved benchmarks, taken in turns with the base in
one run; those of a GPU appear once a run of the same cases is saved beside them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from make_figures import BLUE, GREEN, INK, ORANGE, panels
from make_performance import load_records
from matplotlib.figure import Figure

from claims.claim import Claim, table

CLAIM = Claim(
    says="Preconditioners cost little: 0 to 5.5 % of training for LUCID, 4 % for the row norm",
    source=(
        "LUCID's README “Results”, list; "
        "CCQ Appendix C, Table 5; "
        "Preconditioned Attention §5.1, Table 2"
    ),
    verdict="needs a GPU",
    because=(
        "The papers' numbers are those of whole models or layers on GPUs. On two CPU cores, of "
        "one call of attention, the row norm adds 3 % and LASER up to 5 %, which agrees with small "
        "overheads. LUCID adds 120 % with as many key heads as query heads and 13 % with one, and "
        "32 % when decoding; CCQ adds 67 % to GLA and 92 % to the gated delta rule, and more to "
        "their gradients."
    ),
)
SMALL: dict[str, Any] = {}
"""Arguments of `run` for a test."""
ALT = (
    "Times over those of the base on two CPU cores. LUCID takes 2.2 times as long, or 1.1 with "
    "one key head, CCQ 1.7 to 2.3 times, LASER and the row norm hardly longer."
)


class Cost(NamedTuple):
    """A benchmark, the peer that it is compared with, and what a document reports, and where."""

    case: str
    peer: str
    reported: str = ""
    place: str = ""


README, CCQ, ROW_NORM = CLAIM.source.split("; ")
COSTS = {
    "LUCID, forward": Cost("lucid", "sdpa"),
    "LUCID, forward, one key head": Cost("lucid_one_kv_head", "sdpa"),
    "LUCID, training step": Cost("lucid_backward", "sdpa", "0 to 5.5 % of a model", README),
    "LUCID, decoding": Cost("lucid_decode", "sdpa", "1.3 % of a model, at 32K", README),
    "LASER, forward": Cost("laser", "base"),
    "LASER, training step": Cost("laser_backward", "base"),
    "CCQ of GLA, forward": Cost("ccq_gla", "base"),
    "CCQ of GLA, training step": Cost("ccq_gla_backward", "base", "1.2 ms of a layer", CCQ),
    "CCQ of the gated delta rule, forward": Cost("ccq_gated_delta", "base"),
    "CCQ of the gated delta rule, training step": Cost(
        "ccq_gated_delta_backward", "base", "2.2 ms of a layer", CCQ
    ),
    "row norm, forward": Cost("row_normalized", "base"),
    "row norm, training": Cost("", "", "29:28 to 30:45 hours of a ViT-B, 4.4 %", ROW_NORM),
}


def run() -> dict[str, Any]:
    """For each cost and device, the ratio with quartiles and the sizes; None if not measured."""
    records = load_records()
    found: dict[str, Any] = {}
    for title, cost in COSTS.items():
        rows = [row for record in records.values() for row in record.rows if row.case == cost.case]
        known = {row.device.partition(":")[0]: row for row in rows if cost.peer in row.ratios}
        found[title] = {"cpu": None, "cuda": None}
        for device, row in known.items():
            ratio = row.ratios[cost.peer]
            numbers = [round(ratio[x], 3) for x in ("median", "q1", "q3")]
            found[title][device] = {"ratio": numbers, "tokens": row.sizes["s"], "dtype": row.dtype}
    return found


def rows(found: dict[str, Any]) -> str:
    """The ratios beside what is reported."""

    def ratio(of: dict[str, Any] | None) -> str:
        return "" if of is None else "{:.2f} ({:.2f} to {:.2f})".format(*of["ratio"])

    head = ("call", "tokens", "time / base's, 2 CPU cores", "on a GPU", "reported", "in")
    cells = [
        (
            title,
            next((f"{of['tokens']:,}" for of in x.values() if of), ""),
            ratio(x["cpu"]),
            ratio(x["cuda"]),
            COSTS[title].reported,
            COSTS[title].place,
        )
        for title, x in found.items()
    ]
    return table(head, cells)


def draw(found: dict[str, Any]) -> Figure:
    """Medians as bars from 1, quartiles as lines."""
    figure, (ax,) = panels(1, height=3.2)
    colours = {"LUCID": ORANGE, "LASER": BLUE, "CCQ": GREEN, "row": INK}
    found = {title: x["cpu"]["ratio"] for title, x in found.items() if x["cpu"]}
    for i, (title, (middle, low, high)) in enumerate(found.items()):
        colour = next(c for name, c in colours.items() if title.startswith(name))
        ax.barh(i, middle - 1, left=1, height=0.6, color=colour, alpha=0.6)
        ax.plot([low, high], [i, i], color=colour, linewidth=2.5)
    ax.axvline(1, color=INK, linewidth=0.8)
    ax.set_yticks(np.arange(len(found)), list(found))
    ax.invert_yaxis()
    ax.set(xlabel="time / time of the base", xlim=(0.9, None))
    return figure
