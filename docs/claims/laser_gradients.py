"""The Jacobian of one output with respect to the logits, as attention saturates.

Softmax: ∂o_c/∂s_j = a_j (v_jc − o_c). LASER: ∂o_c/∂s_j = w_jc − a_j, with the posterior weights
w_jc = a_j exp(v_jc − o_c). Both are exact, and are read here from the library's own gradient: with
one-hot keys the logits are the queries' entries.
"""

import numpy as np
from drawing import BLUE, ORANGE, legend_below, panels
from recorded import table

import precondattn as pa

SMALL = {"values": (1.0, 8.0)}
GAPS = tuple(range(0, 17, 2))
MECHANISMS = {"softmax": pa.Softmax(scale=1.0), "laser": pa.Laser(pa.Softmax(scale=1.0))}
CASES = {"attention on the smaller value": -1.0, "attention on the larger value": 1.0}


def norms(attn, gap, apart):
    """‖∂o/∂s‖ of a query of two keys, whose logits differ by `gap` and values by `apart`."""
    q = np.zeros((1, 2, 1, 2))
    q[0, 1, 0] = (gap, 0.0)
    k = np.eye(2).reshape(1, 2, 1, 2)
    v = np.array([apart, 0.0]).reshape(1, 2, 1, 1)
    return pa.diagnostics.jacobian_norms(attn, q, k, v, of=("q",), tokens=(1,))["q"].item()


def run(values=(0.5, 1.0, 2.0, 4.0, 8.0)):
    """Norms for each case, mechanism, distance of the values and gap of the logits."""
    found = {"gaps": list(GAPS), "values": list(values)}
    for case, sign in CASES.items():
        for name, attn in MECHANISMS.items():
            found[f"{case}, {name}"] = [
                [norms(attn, float(gap), sign * apart) for gap in GAPS] for apart in values
            ]
    return found


def rows(found):
    """LASER's norm over softmax's, at three gaps."""
    cells = []
    for case in CASES:
        for i, apart in enumerate(found["values"]):
            ratio = np.divide(found[f"{case}, laser"][i], found[f"{case}, softmax"][i])
            cells.append((case, apart, *(float(ratio[GAPS.index(gap)]) for gap in (0, 4, 12))))
    head = ("case", "distance of values", "LASER / softmax at gap 0", "at gap 4", "at gap 12")
    return table(head, cells)


def draw(found):
    """Norms for the distances 1 and 8."""
    figure, axes = panels(2, height=3.0)
    for ax, case in zip(axes, CASES, strict=True):
        for name, colour in (("softmax", BLUE), ("laser", ORANGE)):
            for apart, style in ((1.0, "--"), (8.0, "-")):
                y = found[f"{case}, {name}"][found["values"].index(apart)]
                label = f"{name}, values {apart:.0f} apart"
                ax.plot(GAPS, y, color=colour, linestyle=style, label=label)
        ax.set(title=case, yscale="log", xlabel="gap of the logits", ylim=(1e-7, 10))
    axes[0].set_ylabel("norm of the gradient")
    legend_below(figure, axes[0], 2)
    return figure
