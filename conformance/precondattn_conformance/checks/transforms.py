"""The check `transforms`: `vmap`, and `torch.compile` or `jax.jit`."""

from __future__ import annotations

import numpy as np

from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Check, Measured, Trial


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
        cotangent = trial.library.array(trial.expected.cotangent, trial.case.dtype)
        for name, transform in trial.library.transforms().items():
            function = transform(trial.call)
            if name == "vmap":
                pairs["the mapped output"] = _mapped(trial, function)
                continue
            out = trial.numpy(function(trial.inputs))
            pairs[f"the output under {name}"] = (out, trial.expected.out)
            gradients = trial.automatic(function, trial.inputs, cotangent)
            pairs |= trial.pairs_of_gradients(gradients, f"the gradient under {name}")
        trial.require_purity()
        terms = {
            what: size
            for name, size in trial.expected.terms.items()
            for what in pairs
            if what.endswith(f" of {name}")
        }
        return trial.agree(pairs, terms)


def _mapped(trial: Trial, function: object) -> tuple[np.ndarray, np.ndarray]:
    """The output of two calls mapped into one, and the oracle's."""
    first, second = trial.numpy_inputs, trial.reversed_inputs
    both = {name: np.stack([first[name], second[name]]) for name in first}
    out = trial.numpy(function(trial.arrays(both)))  # type: ignore[operator]
    other = trial.mechanism(**second, backend="reference")
    return out, np.stack([trial.expected.out, other])
