"""Calls that the library transforms: `vmap`, `jax.jit`, and `torch.compile` with varying sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from precondattn.arrays import Array, Arrays
from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Check, Measured, Trial
from precondattn_conformance.disagreement import DisagreementError

SIZES = ((2, 9), (3, 12), (4, 7))
"""Batch sizes and lengths, in the order of the calls."""
MOST_GRAPHS = 2
"""The largest number of graphs: one for the first sizes, one with symbolic sizes for all others."""


class Transforms(Check):
    """A mapped or compiled call, and its gradient, equal those of the plain call.

    PyTorch has `torch.vmap` and `torch.compile`, JAX `jax.vmap` and `jax.jit`. The mapped call has
    two different batches; the gradient is that of the compiled function.
    """

    name = "transforms"
    snippet = """call = {compiled}(lambda x: mechanism(**x, backend={backend}){eagerly})
out = call(inputs)  # The check also maps it, and differentiates it."""

    def applies(self, case: Case) -> bool:
        return case.library in ("torch", "jax") and case.layout.mask is None

    def run(self, trial: Trial) -> Measured:
        trial.require_outputs()
        pairs = {}
        for name, transform in trial.library.transforms().items():
            function = transform(trial.call)
            if name == "vmap":
                pairs["the mapped output"] = _mapped(trial, function)
                continue
            out = trial.numpy(function(trial.inputs))
            pairs[f"the output under {name}"] = (out, trial.expected.out)
            gradients = trial.automatic(function, trial.inputs, trial.cotangent())
            pairs |= trial.pairs_of_gradients(gradients, f"the gradient under {name}")
        trial.require_purity()
        return trial.agree(pairs)


def _mapped(trial: Trial, function: object) -> tuple[np.ndarray, np.ndarray]:
    """The output of two calls mapped into one, and the oracle's."""
    first, second = trial.numpy_inputs, trial.reversed_inputs
    both = {name: np.stack([first[name], second[name]]) for name in first}
    out = trial.numpy(function(trial.arrays(both)))  # type: ignore[operator]
    other = trial.mechanism(**second, backend="reference")
    return out, np.stack([trial.expected.out, other])


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
        import torch
        from torch._dynamo.testing import CompileCounterWithBackend

        trial.require_outputs()
        mechanism, backend = trial.mechanism, trial.backend

        def call(inputs: Arrays) -> Array:
            return mechanism(**inputs, backend=backend)

        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(call, fullgraph=True, backend=counter)
        worst = Measured(0.0, trial.bound)
        for b, t in SIZES:
            layout = trial.case.layout._replace(b=b, t=t, s=t)
            sized = replace(trial, case=replace(trial.case, layout=layout))
            measured = _measured(sized, compiled)
            worst = max(worst, measured, key=lambda each: each.error)
        graphs = counter.frame_count
        if graphs > MOST_GRAPHS:
            raise DisagreementError(
                f"{len(SIZES)} lengths and batches took {graphs} graphs of torch.compile, where "
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

    gradients = trial.automatic(call, trial.inputs, trial.cotangent())
    out = outs[0].detach() if outs else compiled(trial.inputs)
    trial.require_purity()
    return trial.agree(trial.pairs_of(out, gradients, "autograd"))
