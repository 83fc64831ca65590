"""The check `dynamic_shapes`: PyTorch's compiler with varying lengths and batch sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from precondattn.arrays import Array, Arrays
from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Check, Measured, Trial
from precondattn_conformance.disagreement import DisagreementError

SIZES = ((2, 9), (3, 12), (4, 7))
"""Batch sizes and lengths, in the order of the calls."""
MOST_GRAPHS = 2
"""The largest number of graphs: one for the first sizes, one with symbolic sizes for all others."""


class DynamicShapes(Check):
    """One compiled function equals the oracle at every length and batch size, with two graphs.

    It compares outputs and gradients, in PyTorch only, with `fullgraph=True`. More graphs mean that
    tracing specialises on a length.
    """

    name = "dynamic_shapes"
    snippet = """call = {compiled}(
    lambda x: mechanism(**x, backend={backend}), fullgraph=True{eagerly}
)
out = call(inputs)  # The check calls it at three lengths and batches."""

    def applies(self, case: Case) -> bool:
        return case.library == "torch" and case.layout.mask is None

    def run(self, trial: Trial) -> Measured:
        trial.require_outputs()
        mechanism, backend = trial.mechanism, trial.backend

        def call(inputs: Arrays) -> Array:
            return mechanism(**inputs, backend=backend)

        compiled, graphs = trial.library.compiled_and_counted(call)
        worst = Measured(0.0, trial.bound)
        for b, t in SIZES:
            layout = trial.case.layout._replace(b=b, t=t, s=t)
            sized = replace(trial, case=replace(trial.case, layout=layout))
            measured = _measured(sized, compiled)
            worst = max(worst, measured, key=lambda each: each.error)
        if graphs() > MOST_GRAPHS:
            raise DisagreementError(
                f"{len(SIZES)} lengths and batches took {graphs()} graphs of torch.compile, where "
                f"{MOST_GRAPHS} are allowed: something in the call depends on a size while it is "
                "traced, such as a branch, a cache by shape, or a number read from a tensor"
            )
        return worst


def _measured(trial: Trial, compiled: Callable[[Arrays], Array]) -> Measured:
    """The error of the compiled function's output and gradient at one size."""
    outs = []

    def call(inputs: Arrays) -> Array:
        outs.append(compiled(inputs))
        return outs[-1]

    cotangent = trial.library.array(trial.expected.cotangent, trial.case.dtype)
    gradients = trial.automatic(call, trial.inputs, cotangent)
    out = outs[0].detach() if outs else compiled(trial.inputs)
    trial.require_purity()
    pairs = {"the output": (trial.numpy(out), trial.expected.out)}
    pairs |= trial.pairs_of_gradients(gradients, "autograd")
    return trial.agree(pairs, trial.terms_of_gradients())
