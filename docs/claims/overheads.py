"""What a mechanism adds to the time of its base: what papers report, and what was measured.

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
    source="tables of the papers on LUCID, CCQ and the row norm",
    verdict="needs a GPU",
    because=(
        "The papers' numbers are those of whole models on GPUs. On two CPU cores, of one call of "
        "attention, the row norm adds 3 % and LASER 3 to 7 %, which agrees with small overheads. "
        "LUCID adds 150 % with as many key heads as query heads and 20 % with one, and 32 % when "
        "decoding; CCQ adds 83 %."
    ),
)
SMALL: dict[str, Any] = {}
"""Arguments of `run` for a test."""
ALT = "Ratio of times with and without each preconditioner on two CPU cores, with quartiles."


class Cost(NamedTuple):
    """A benchmark, the peer that it is compared with, and what the paper reports."""

    case: str
    peer: str
    reported: str


COSTS = {
    "LUCID, forward": Cost("lucid", "sdpa", ""),
    "LUCID, forward, one key head": Cost("lucid_one_kv_head", "sdpa", ""),
    "LUCID, training step": Cost("lucid_backward", "sdpa", "0 to 5.5 % of a model"),
    "LUCID, decoding": Cost("lucid_decode", "sdpa", "1.3 % of a model, at 32K"),
    "LASER, forward": Cost("laser", "base", ""),
    "LASER, training step": Cost("laser_backward", "base", "no number"),
    "CCQ of the gated delta rule, forward": Cost("ccq_gated_delta", "base", "2.2 ms of a layer"),
    "row norm, forward": Cost("row_normalized", "base", "4.4 % of training a ViT-B"),
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

    head = ("call", "tokens", "reported", "time / base's, 2 CPU cores", "on a GPU")
    cells = [
        (
            title,
            f"{x['cpu']['tokens']:,}",
            COSTS[title].reported,
            ratio(x["cpu"]),
            ratio(x["cuda"]),
        )
        for title, x in found.items()
    ]
    return table(head, cells)


def draw(found: dict[str, Any]) -> Figure:
    """Medians as bars from 1, quartiles as lines."""
    figure, (ax,) = panels(1, height=2.8)
    colours = {"LUCID": ORANGE, "LASER": BLUE, "CCQ": GREEN, "row": INK}
    for i, (title, x) in enumerate(found.items()):
        middle, low, high = x["cpu"]["ratio"]
        colour = next(c for name, c in colours.items() if title.startswith(name))
        ax.barh(i, middle - 1, left=1, height=0.6, color=colour, alpha=0.6)
        ax.plot([low, high], [i, i], color=colour, linewidth=2.5)
    ax.axvline(1, color=INK, linewidth=0.8)
    ax.set_yticks(np.arange(len(found)), list(found))
    ax.invert_yaxis()
    ax.set(xlabel="time / time of the base", xlim=(0.9, None))
    return figure
