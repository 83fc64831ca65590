"""The check of padding: NaN after a sequence's length has no effect."""

from __future__ import annotations

import numpy as np

from precondattn.arrays import Arrays
from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import VJP, Check, Measured, Trial
from precondattn_conformance.disagreement import require_same


class PaddedLengths(Check):
    """Padding after a sequence's length may contain NaN, which reaches no output and no gradient.

    Outputs and gradients of padding are 0.
    """

    name = "padding"
    snippet = f"# The check has NaN in padding.\n{VJP}"

    def applies(self, case: Case) -> bool:
        return case.layout.has("lengths")

    def run(self, trial: Trial) -> Measured:
        trial.require_outputs()
        padded, is_padding = with_nan(trial)
        out, gradients = trial.results(trial.arrays(padded))
        measured = trial.agree(trial.pairs_of(out, gradients))
        for name in gradients.keys() & is_padding.keys():
            what, found = f"the gradient of {name}", trial.numpy(gradients[name])
            reason = "is not 0 in padding, which reaches no output"
            require_same(
                what, found, np.where(is_padding[name], 0.0, found), reason, trial.axes(what)
            )
        return measured


def with_nan(trial: Trial) -> tuple[Arrays, Arrays]:
    """The inputs with NaN in padding, and masks that are true at padding."""
    layout = trial.case.layout
    lengths = layout.masks()["lengths"]
    padded, is_padding = {}, {}
    for name, array in trial.numpy_inputs.items():
        pattern = trial.mechanism.inputs[name]
        letters = "".join(axis.letter for axis in pattern.axes)
        time = pattern.time_axis
        if time is None or pattern.is_pairwise or not letters.startswith("b"):
            padded[name] = array
            continue
        after = np.arange(layout.t) >= lengths[:, None]
        shape = [1] * array.ndim
        shape[0], shape[time] = layout.b, layout.t
        is_padding[name] = np.broadcast_to(after.reshape(shape), array.shape)
        padded[name] = np.where(is_padding[name], np.nan, array)
    return padded, is_padding
