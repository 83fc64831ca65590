"""The check `autocast`: calls under PyTorch's autocast."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from precondattn.arrays import Array, Arrays
from precondattn_conformance.case import Case
from precondattn_conformance.checks.caching import Caching, extended
from precondattn_conformance.checks.check import Check, Measured, Trial
from precondattn_conformance.declared import mechanism_of
from precondattn_conformance.disagreement import require_same


class Autocast(Check):
    """A float32 call under autocast agrees with the oracle, and equals a call in autocast's dtype.

    It checks forward, gradient and extend; the gradient is computed under autocast too. The
    equality is exact, which shows that nothing inside was computed in another precision. In the
    explicit `vjp` some inputs are in half precision already, and each gradient has the dtype of its
    own input.
    """

    name = "autocast"
    snippet = """wide = {{n: a.float() if a.is_floating_point() else a for n, a in inputs.items()}}
with torch.autocast({device}, torch.{dtype}):
    out = mechanism(**wide, backend={backend})"""

    def applies(self, case: Case) -> bool:
        inputs = mechanism_of(case.mechanism).inputs.values()
        return case.library == "torch" and any(pattern.is_rows for pattern in inputs)

    def run(self, trial: Trial) -> Measured:
        trial.require_outputs()
        wide, time = _Wide(trial.case, trial.library, trial.backend), trial.case.layout.t
        half = trial.arrays(trial.numpy_inputs)
        # Every other input is in half precision, as when float32 keys meet half-precision values.
        inputs = {n: half[n] if i % 2 else a for i, (n, a) in enumerate(wide.inputs.items())}
        cotangent = trial.cotangent()
        with trial.library.autocast(trial.case.dtype):
            out = wide.call()
            automatic = trial.automatic(wide.call, wide.inputs, cotangent)
            _, explicit = wide.results(inputs)
            ends, is_causal = [time - 1, time], Caching().applies(wide.case)
            tokens = extended(wide, ends, [wide.backend]) if is_causal else None
        trial.require_dtype("the output", out, trial.case.dtype)
        for name, gradient in explicit.items():
            dtype = trial.library.dtype_name(inputs[name])
            trial.require_dtype(f"the gradient of {name}", gradient, dtype)
        # Autocast casts rows; gates, weights and the like stay in float32.
        patterns = trial.mechanism.inputs
        cast = {n: half[n] if patterns[n].is_rows else a for n, a in wide.inputs.items()}
        _require_same(trial, "the output", out, trial.call(cast))
        for name, gradient in trial.automatic(trial.call, cast, cotangent).items():
            _require_same(trial, f"the gradient of {name}", automatic[name], gradient)
        pairs = trial.pairs_of(out, explicit) | trial.pairs_of_gradients(automatic, "autograd")
        if tokens is not None:
            pairs["the extended output"] = tokens
        return trial.agree(pairs)


class _Wide(Trial):
    """The trial with float32 arrays, whose values are those rounded to the case's dtype."""

    def arrays(self, arrays: Mapping[str, np.ndarray], dtype: str | None = None) -> Arrays:
        return super().arrays(arrays, "float32")


def _require_same(trial: Trial, what: str, result: Array, expected: Array) -> None:
    require_same(
        what,
        trial.numpy(result),
        trial.numpy(expected),
        "under autocast is not that of the same call on inputs in half precision, so something "
        "inside is computed in another dtype",
        trial.axes(what),
        ("under autocast", "from inputs in half precision"),
    )
