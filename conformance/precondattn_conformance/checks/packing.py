"""Checks of packed and padded sequences: `packing` and `padding`."""

from __future__ import annotations

import numpy as np

from precondattn.arrays import Arrays
from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import VJP, Check, Measured, Trial
from precondattn_conformance.disagreement import require_same
from precondattn_conformance.oracle import Oracle


class Packing(Check):
    """Segments of a packed call equal calls on each segment alone, and so do their gradients.

    The oracle computes each segment without a mask, so that its own handling of segments is not
    assumed to be right. The gradient of an input without tokens is the sum over all segments.
    """

    name = "packing"
    is_plain = True

    def applies(self, case: Case) -> bool:
        return case.layout.has("segment_ids")

    def run(self, trial: Trial) -> Measured:
        trial.require_outputs()
        out, gradients = trial.results()
        trial.require_purity()
        expected_out, expected = _one_by_one(trial)
        pairs = {"the output": (trial.numpy(out), expected_out)}
        pairs |= {f"vjp of {n}": (trial.numpy(g), expected[n]) for n, g in gradients.items()}
        return trial.agree(pairs)


def _one_by_one(trial: Trial) -> tuple[np.ndarray, Arrays]:
    """The output and the gradients, from one call per segment."""
    expected: Oracle = trial.expected
    m, segments = trial.mechanism, expected.masks["segment_ids"]
    out = np.zeros_like(expected.out)
    gradients = {name: np.zeros_like(array) for name, array in expected.inputs.items()}
    for b in range(segments.shape[0]):
        for segment in np.unique(segments[b]):
            tokens = np.flatnonzero(segments[b] == segment)
            indices = {name: _index(trial, name, b, tokens) for name in expected.inputs}
            alone = {name: expected.inputs[name][index] for name, index in indices.items()}
            out_of_segment, pullback = m.vjp(**alone, backend="reference")
            rows = np.ix_(np.asarray([b]), tokens)
            out[rows] = out_of_segment
            for name, gradient in pullback(expected.cotangent[rows]).items():
                gradients[name][indices[name]] += gradient
    return out, gradients


def _index(trial: Trial, name: str, b: int, tokens: np.ndarray) -> tuple[np.ndarray, ...]:
    """The index of some tokens of one sequence in an input."""
    shape = trial.expected.inputs[name].shape
    axes = trial.mechanism.inputs[name].axes
    indices = []
    for axis, size in zip(axes, shape, strict=True):
        if size > 1 and axis.letter == "b":
            indices.append(np.asarray([b]))
        elif size > 1 and axis.letter in ("t", "s"):
            indices.append(tokens)
        else:
            indices.append(np.arange(size))
    return np.ix_(*indices)


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
