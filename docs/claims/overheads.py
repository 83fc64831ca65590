"""The time that a mechanism adds to its base: the papers' figures, and measured ones.

Nothing is timed here. The ratios are those of the saved benchmarks, taken in turns with the base in
one run; those of a GPU appear once a run of the same cases is saved beside them.
"""

import numpy as np
from drawing import BLUE, GREEN, INK, ORANGE, panels
from make_performance import load_records
from recorded import table

SMALL: dict = {}
README, CCQ = "LUCID's README “Results”, list", "CCQ Appendix C, Table 5"
COSTS = {
    "LUCID, forward": ("lucid", "sdpa", "", ""),
    "LUCID, forward, one key head": ("lucid_one_kv_head", "sdpa", "", ""),
    "LUCID, training step": ("lucid_backward", "sdpa", "0 to 5.5 % of a model", README),
    "LUCID, decoding": ("lucid_decode", "sdpa", "1.3 % of a model, at 32K", README),
    "LASER, forward": ("laser", "base", "", ""),
    "LASER, training step": ("laser_backward", "base", "", ""),
    "CCQ of GLA, forward": ("ccq_gla", "base", "", ""),
    "CCQ of GLA, training step": ("ccq_gla_backward", "base", "1.2 ms of a layer", CCQ),
    "CCQ of the gated delta rule, forward": ("ccq_gated_delta", "base", "", ""),
    "CCQ of the gated delta rule, training step": (
        *("ccq_gated_delta_backward", "base"),
        *("2.2 ms of a layer", CCQ),
    ),
    "row norm, forward": ("row_normalized", "base", "", ""),
    "row norm, training": (
        *("", "", "29:28 to 30:45 hours of a ViT-B, 4.4 %"),
        "Preconditioned Attention §5.1, Table 2",
    ),
}
"""Benchmarks, the peer that each is compared with, and what a document reports, and where."""


def run():
    """For each cost and device, the ratio with quartiles and the sizes; None if not measured."""
    all_rows = [row for record in load_records().values() for row in record.rows]
    found = {}
    for title, (case, peer, _, _) in COSTS.items():
        rows = [row for row in all_rows if row.case == case and peer in row.ratios]
        found[title] = {"cpu": None, "cuda": None}
        for row in rows:
            numbers = [round(row.ratios[peer][x], 3) for x in ("median", "q1", "q3")]
            measured = {"ratio": numbers, "tokens": row.sizes["s"], "dtype": row.dtype}
            found[title][row.device.partition(":")[0]] = measured
    return found


def rows(found):
    """The ratios beside what is reported."""
    head = ("call", "tokens", "time / base's, 2 CPU cores", "on a GPU", "reported", "in")
    cells = []
    for title, x in found.items():
        tokens = next((f"{of['tokens']:,}" for of in x.values() if of), "")
        ratios = (
            "{:.2f} ({:.2f} to {:.2f})".format(*of["ratio"]) if of else "" for of in x.values()
        )
        cells.append((title, tokens, *ratios, *COSTS[title][2:]))
    return table(head, cells)


def draw(found):
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
