"""LASER in a vision transformer that learns to read digits, and what LASER loses in bfloat16.

Four models differ in their mechanism only: softmax, LASER, and differential attention around
either. They learn scikit-learn's digits as in `row_norm_digits.py`, at the rate that is best for
softmax there. Then q, k and v of LASER's models, rounded to bfloat16, with v times a factor, go
through attention in bfloat16. Each operation below has a bfloat16 result:

    softmax                     A v
    LASER, plain                log(A exp(v))
    LASER, with the maximum     log(A exp(v − m)) + m,  m = max_j v_j, the paper's Algorithm 1
    LASER, the library          `laser`
    LASER, only rounded         the exact result, rounded

The error is ‖o − exact‖ / ‖exact‖ of a head of an image, with the exact output of the same rounded
q, k and v in float64.
"""

from copy import deepcopy

import numpy as np
from drawing import BLUE, GREEN, INK, ORANGE, panels, ticks
from recorded import table, with_range

import precondattn as pa
from claims.digits import learn, load, reader, rows_of
from claims.trainings import gaining, over_seeds, trained

SMALL = {"epochs": 1, "seeds": (0,), "made_up": 60, "kept": False}
BASE = "softmax[causal=false]"
LASER = f"laser({BASE})"
MODELS = {
    "softmax": (BASE,),
    "LASER": (LASER,),
    "differential": (f"differential({BASE})",),
    "differential, LASER": (f"differential({LASER})",),
}
PAIRS = {"softmax": "LASER", "differential": "differential, LASER"}
COLOURS = {"softmax": ORANGE, "LASER": BLUE, "differential": GREEN, "differential, LASER": INK}
WAYS = {
    "LASER, plain": (GREEN, "-"),
    "LASER, with the maximum": (INK, "-"),
    "LASER, the library": (BLUE, "-"),
    "LASER, only rounded": (BLUE, "o"),
    "softmax": (ORANGE, "--"),
}
"""The colour and the line of each way to compute LASER."""
FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""The factors by which the values are multiplied."""
SHOWN = (0.125, 1.0, 8.0, 64.0)
"""The factors in the table."""


def by_way(q, k, v, exact):
    """The outputs in the dtype of q, k and v."""
    attn = pa.parse(BASE)
    largest = v.amax(1, keepdim=True)
    return {
        "softmax": attn(q, k, v),
        "LASER, plain": attn(q, k, v.exp()).log(),
        "LASER, with the maximum": attn(q, k, (v - largest).exp()).log() + largest,
        "LASER, the library": pa.parse(LASER)(q, k, v),
        "LASER, only rounded": exact.to(v.dtype),
    }


def errors(model, images):
    """For each way, its mean error at each factor, and the deviation of the values."""
    import torch

    blocks = rows_of(model, images)
    found = {way: [] for way in WAYS}
    found["deviation"] = [float(torch.stack([v for _, _, v in blocks]).std())]
    for factor in FACTORS:
        of = {way: [] for way in WAYS}
        for q, k, v in blocks:
            given = [x.bfloat16() for x in (q, k, factor * v)]
            exact = {name: pa.parse(name)(*(x.double() for x in given)) for name in (BASE, LASER)}
            for way, out in by_way(*given, exact[LASER]).items():
                right = exact[BASE if way == "softmax" else LASER]
                apart = torch.linalg.vector_norm(out.double() - right, dim=(1, 3))
                of[way].append(apart / torch.linalg.vector_norm(right, dim=(1, 3)))
        for way, each in of.items():
            found[way].append(float(f"{torch.cat(each).mean().item():.3g}"))
    return found


def train(seed, mechanism, epochs, made_up):
    """The accuracy after each epoch, that in bfloat16 at the end, and LASER's errors in it."""
    images, model, accuracy = load(made_up), reader(mechanism, seed), []
    learn(model, images, epochs, 3e-3, lambda epoch: accuracy.append(images.accuracy(model)))
    found = {"accuracy": accuracy, "bfloat16": images.accuracy(deepcopy(model).bfloat16())}
    if mechanism == LASER:
        found["errors"] = errors(model, images.held_out[:64])
    return found


def run(epochs=20, made_up=None, **options):
    """On the digits or on as many `made_up` images."""
    return trained("laser_vision", train, MODELS, epochs=epochs, made_up=made_up, **options)


def wrong(found, title):
    """Held-out errors in % (seeds, epochs)."""
    return 100 * (1 - over_seeds(found, title, "accuracy"))


def in_bfloat16(found, way):
    """Mean errors in % at each factor."""
    return 100 * over_seeds(found, "LASER", "errors", way).mean(0)


def deviation(found):
    return over_seeds(found, "LASER", "errors", "deviation").mean()


def rows(found):
    """Held-out errors without and with LASER; errors in bfloat16 by the values' deviation."""
    cells = []
    for pair in PAIRS.items():
        last = [wrong(found, title)[:, -1] for title in pair]
        apart = last[1] - last[0]
        gains = (with_range(apart, "+.1f"), gaining(apart))
        for title, of, more in zip(pair, last, (("", ""), gains), strict=True):
            half = 100 * (1 - over_seeds(found, title, "bfloat16"))
            cells.append((title, with_range(of, ".1f", unit=" %"), *more, f"{half.mean():.1f} %"))
    head = ("model", "held-out errors (range of seeds)", "change in points (range)")
    first = table((*head, "seeds that gain", "errors, all in bfloat16"), cells)
    cells = []
    for way in WAYS:
        of = [in_bfloat16(found, way)[FACTORS.index(factor)] for factor in SHOWN]
        cells.append((way, *(f"{x:.2f} %" if np.isfinite(x) else "∞" for x in of)))
    head = ("way", *(f"deviation {factor * deviation(found):.1f}" for factor in SHOWN))
    return f"{first}\n\nRelative errors in bfloat16:\n\n{table(head, cells)}"


def draw(found):
    """Held-out errors by epoch, means of seeds; errors in bfloat16 by the values' deviation."""
    figure, (left, right) = panels(2, height=3.4)
    for title, colour in COLOURS.items():
        left.plot(wrong(found, title).mean(0), color=colour, label=title, linewidth=1.3)
    left.set(xlabel="epoch", ylabel="held-out errors in %", yscale="log")
    ticks(left.yaxis, (5, 10, 20, 50))
    for way, (colour, style) in WAYS.items():
        mean = in_bfloat16(found, way)
        mean[~np.isfinite(mean)] = np.nan
        right.plot(deviation(found) * np.array(FACTORS), mean, style, color=colour, label=way)
    right.axvline(deviation(found), color=INK, linewidth=0.8)
    right.set(xscale="log", yscale="log", xlabel="deviation of the values", title="in bfloat16")
    right.set_ylabel("relative error in %")
    right.set_xticks((0.1, 1, 10), ("0.1", "1", "10"))
    ticks(right.yaxis, (0.2, 0.5, 1, 2))
    right.set_ylim(top=20)  # Room for the legend.
    for ax in (left, right):
        ax.legend(fontsize=8)
    return figure
