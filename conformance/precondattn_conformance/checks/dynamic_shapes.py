"""Under PyTorch's compiler, with lengths and batches that vary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from precondattn.arrays import Array, Arrays
from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Check, Measured, Trial
from precondattn_conformance.disagreement import DisagreementError

SIZES = ((2, 9), (3, 12), (4, 7))
"""Batches and lengths, in the order of the calls."""
MOST_GRAPHS = 2
"""One for the first sizes, and one with symbols for all others."""


class DynamicShapes(Check):
    """One compiled function equals the oracle at every length and batch, and takes two graphs.

    PyTorch only. Outputs and gradients, with `fullgraph=True`; more graphs mean that something
    depends on a length while the call is traced.
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
    """Output and gradient of the compiled function at one size."""
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
