"""The row norm in a vision transformer that learns to read digits: accuracy and conditioning.

Two models of four blocks differ in one thing, softmax or row_normalized(softmax). While they learn
scikit-learn's digits, this measures

    A       softmax(qkᵀ) v of each head, and CA where the model has the row norm;
    J       the gradients of all logits of ten images by the weights, as training has them: with the
            paper's C, which is a constant to the gradient;
    κ       σ₁ / σ_k of either.
"""

import numpy as np
from drawing import BLUE, ORANGE, band, legend_below, panels
from recorded import table

import precondattn as pa
from claims.digits import learn, load, reader, rows_of
from claims.inputs import counter_example

SMALL = {"made_up": 60, "epochs": 1, "seeds": 1, "rates": (1e-3,)}
BASE = "softmax[causal=false]"
MODELS = {"softmax": BASE, "row norm": f"row_normalized({BASE})"}
COLOURS = {"softmax": BLUE, "row norm": ORANGE}
BEFORE = "attention before the row norm"
MEASURES = ("attention", "attention, median", BEFORE, f"{BEFORE}, median")
MEASURES += ("Jacobian", "Jacobian of q, k, v")


def constructed(tokens):
    """κ(A), κ(CA), μ(A), μ(CA) of the counter-example."""
    # Logits that differ by 1600: the softmax is 0 and 1 / (n − 1) without an error.
    outputs = [f(**counter_example(tokens, 40)) for f in (pa.softmax, pa.row_normalized)]
    sigma = [np.linalg.svd(o[0, :, 0], compute_uv=False) for o in outputs]
    kappa = [s[0] / s[1] for s in sigma]
    return [float(x) for x in (*kappa, *(2 * np.mean(s * s) / np.prod(s) for s in sigma))]


def condition_numbers(model, images):
    """MEASURES: mean and median κ of all heads, blocks and images, and κ of both Jacobians."""
    import torch

    def kappa(matrices):
        sigma = torch.linalg.svdvals(torch.stack(matrices).double())
        return sigma[..., 0] / sigma[..., -1]

    found, rows = [], rows_of(model, images)
    used = [block.attn.mechanism(*each) for block, each in zip(model.blocks, rows, strict=True)]
    for outputs in (used, [pa.parse(BASE)(*each) for each in rows]):
        of_heads = kappa([x.movedim(2, 1) for x in outputs])
        found += [of_heads.mean(), of_heads.median()]
    names, weights = zip(*model.named_parameters(), strict=True)
    of_rows = [any(f".{row}_proj." in name for row in "qkv") for name in names]
    logits = model(images[:10]).flatten()
    gradients = [torch.autograd.grad(x, weights, retain_graph=True) for x in logits]
    for chosen in ([True] * len(names), of_rows):
        parts = (
            [g.flatten() for g, is_in in zip(gs, chosen, strict=True) if is_in] for gs in gradients
        )
        found.append(kappa([torch.cat(each) for each in parts]))
    return [float(f"{x.item():.4g}") for x in found]


def trained(name, data, epochs, checked, rate, seed):
    """One run: the accuracy on held-out images after each epoch, and condition numbers at some."""
    model = reader(MODELS[name], seed)
    run = {"accuracy": [], "loss": [], **{measure: [] for measure in MEASURES}}

    def check(epoch):
        run["accuracy"].append(data.accuracy(model))
        if epoch in checked:
            found = condition_numbers(model, data.held_out[:64])
            for measure, kappa in zip(MEASURES, found, strict=True):
                run[measure].append(kappa)

    run["loss"] = learn(model, data, epochs, rate, check)
    return run


def run(made_up=None, epochs=30, seeds=5, rates=(3e-4, 1e-3, 3e-3)):
    """All runs, on the digits or on as many `made_up` images, with one thread."""
    import torch

    torch.set_num_threads(1)
    found = {
        "torch": torch.__version__,
        "epochs": epochs,
        "checked": sorted({e for e in (0, 2, 4, 8, 16, epochs) if e <= epochs}),
        "seeds": seeds,
        "rates": list(rates),
        "counter-example": {str(n): constructed(n) for n in (12, 17, 65, 197)},
    }
    for name in MODELS:
        found[name] = {}
        for rate in rates:
            arguments = (name, load(made_up), epochs, found["checked"], rate)
            runs = [trained(*arguments, seed) for seed in range(seeds)]
            found[name][f"{rate:g}"] = {key: [one[key] for one in runs] for key in runs[0]}
    return found


def rows(found):
    """Accuracies and condition numbers at the end, and the counter-example."""
    cells = []
    for name in MODELS:
        for rate, of in found[name].items():
            last = [100 * one[-1] for one in of["accuracy"]]
            means = (float(np.mean([one[-1] for one in of[measure]])) for measure in MEASURES)
            spread = f"{np.mean(last):.1f} ± {np.std(last):.1f} %"
            cells.append((f"{name}, rate {rate}", spread, *means))
    first = table(("model", "accuracy", *(f"κ: {measure}" for measure in MEASURES)), cells)
    examples = [(int(n), *map(float, of)) for n, of in found["counter-example"].items()]
    second = table(("tokens", "κ(A)", "κ(CA)", "μ(A)", "μ(CA)"), examples)
    return f"{first}\n\nThe counter-example to Theorem 4.4:\n\n{second}"


def draw(found):
    """Accuracy, and condition numbers, against epochs, for the largest rate."""
    figure, axes = panels(3, height=2.6)
    rate = f"{found['rates'][-1]:g}"
    for name, colour in COLOURS.items():
        for ax, key in zip(axes, ("accuracy", "attention", "Jacobian"), strict=True):
            runs = np.array(found[name][rate][key])
            x = found["checked"] if key != "accuracy" else range(runs.shape[1])
            band(ax, x, runs, colour, name, mean=True, alpha=0.25)
            ax.set(xlabel="epoch", title=key if key == "accuracy" else f"κ, {key}")
    for ax in axes[1:]:
        ax.set_yscale("log")
    legend_below(figure, axes[0], 2)
    return figure
