"""The row norm around Nyström, Swin's and XCiT's attention: accuracy, κ and μ on the digits.

A vision transformer with the mean of all tokens learns the digits. A is the output of a head
without the norm, all tokens (n, d), and CA the same with it, for what a model has learned with the
norm or without. For XCiT, rows are tokens, or channels as in its d × d attention matrix.
"""

import numpy as np
from drawing import BLUE, GREEN, ORANGE, band, legend_below, panels
from recorded import table, with_range

import precondattn as pa
from claims import digits
from claims.trainings import gaining, over_seeds, trained

SMALL = {"made_up": 60, "epochs": 1, "seeds": (0,), "kept": False}
NORM, CHANNELS = ", row norm", ", row norm of channels"
AROUND = {
    "": "{}",
    NORM: "row_normalized[axis=token]({})",
    CHANNELS: "row_normalized[axis=channel]({})",
}
KINDS = {
    "Nyström": (["nystrom[landmarks=8]"] * 4, (NORM,)),
    "Swin": ([f"windowed[size=2,shift={i},grid=4/4,bias=true]" for i in (0, 1)] * 2, (NORM,)),
    "XCiT": (["cross_covariance"] * 4, (NORM, CHANNELS)),
}
"""The bases of the four blocks, and norms around them."""
COLOURS = {"": BLUE, NORM: ORANGE, CHANNELS: GREEN}
MEASURES = ("κ(A)", "κ(CA)", "log μ(A)", "log μ(CA)", "κ rises", "μ rises")
IMAGES = 64
SETTINGS = {kind + norm: (kind, norm) for kind, of in KINDS.items() for norm in ("", *of[1])}


def outputs(model, bases, images):
    """A of all blocks, images and heads (…, n, d), in float64: attention without the norm."""
    import torch

    from precondattn.layers.torch import VisionAttention

    seen = []
    inputs = digits.inputs_of_blocks(model, images)
    with torch.no_grad():
        for block, base, x in zip(model.blocks, bases, inputs, strict=True):
            options = {"heads": digits.HEADS, "mechanism": base, "dtype": torch.float64}
            attn = VisionAttention(x.shape[-1], **options)
            attn.load_state_dict(block.attn.state_dict())
            attn.o_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
            attn(x.double())
    return torch.stack(seen).unflatten(-1, (digits.HEADS, -1)).movedim(-2, -3)


def conditioning(a, axis):
    """MEASURES: medians over all heads, and shares of heads. Along `axis`, CA has length 1."""
    both = a, a / a.norm(dim=axis, keepdim=True)
    kappa, mu = (
        [of(x) for x in both] for of in (pa.diagnostics.condition_number, pa.diagnostics.log_mu)
    )
    medians = [x.median().item() for x in (*kappa, *mu)]
    # Rounding alone can raise μ by about 1e-13 if rows have equal lengths.
    rises = [(x[1] > x[0] + 1e-9).double().mean().item() for x in (kappa, mu)]
    return [float(f"{x:.4g}") for x in (*medians, *rises)]


def train(seed, kind, norm, epochs, made_up):
    """One run: accuracy after each epoch, and MEASURES at the end."""
    bases, data, accuracy = KINDS[kind][0], digits.load(made_up), []
    model = digits.reader([AROUND[norm].format(base) for base in bases], seed, pool="mean")
    digits.learn(model, data, epochs, 3e-3, lambda _: accuracy.append(data.accuracy(model)))
    of = conditioning(outputs(model, bases, data.held_out[:IMAGES]), -2 if norm == CHANNELS else -1)
    return {"accuracy": accuracy, **dict(zip(MEASURES, of, strict=True))}


def run(made_up=None, epochs=12, **options):
    """On the digits or on as many `made_up` images."""
    arguments = {"made_up": made_up, "epochs": epochs, **options}
    return {"epochs": epochs, **trained("row_norm_variants", train, SETTINGS, **arguments)}


def rows(found):
    """Accuracies at the end, conditioning, and the gain of each seed."""
    cells, gains = [], []
    for title, (kind, norm) in SETTINGS.items():
        accuracy = 100 * over_seeds(found, title, "accuracy")[:, -1]
        means = [over_seeds(found, title, key).mean() for key in MEASURES]
        shares = (f"{100 * x:.0f} %" for x in means[4:])
        spread = f"{accuracy.mean():.1f} ± {accuracy.std():.1f} %"
        cells.append((title, spread, *map(float, means[:4]), *shares))
        if norm:
            apart = accuracy - 100 * over_seeds(found, kind, "accuracy")[:, -1]
            gains.append((title, with_range(apart, "+.1f"), gaining(-apart)))
    head = ("model", "points of accuracy gained (range of seeds)", "seeds that gain")
    return f"{table(('model', 'accuracy', *MEASURES), cells)}\n\n{table(head, gains)}"


def draw(found):
    """Accuracy against epochs for each kind."""
    figure, axes = panels(3, height=2.6)
    for ax, kind in zip(axes, KINDS, strict=True):
        for norm in ("", *KINDS[kind][1]):
            of = 100 * over_seeds(found, kind + norm, "accuracy")
            label = norm.removeprefix(", ") or "without"
            band(ax, np.arange(of.shape[1]), of, COLOURS[norm], label, mean=True, alpha=0.25)
        ax.set(title=kind, xlabel="epoch")
    axes[0].set_ylabel("accuracy, %")
    legend_below(figure, axes[-1], 3)
    return figure
