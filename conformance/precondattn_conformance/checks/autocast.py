"""The check `autocast`: calls under PyTorch's autocast."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from precondattn.arrays import Array, Arrays
from precondattn_conformance.case import Case
from precondattn_conformance.checks.caching import Caching, extended
from precondattn_conformance.checks.check import Check, Measured, Trial
from precondattn_conformance.declared import mechanism_of
from precondattn_conformance.disagreement import DisagreementError, require_same


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
        wide = _Wide(trial.case, trial.library, trial.backend)
        inputs = _every_other_in_half(trial, wide.inputs)
        cotangent = trial.cotangent()
        with trial.library.autocast(trial.case.dtype):
            out = wide.call()
            automatic = trial.automatic(wide.call, wide.inputs, cotangent)
            _, explicit = wide.results(inputs)
            tokens = _extended(wide)
        _require_alike("the output", out, trial.case.dtype, trial)
        for name, gradient in explicit.items():
            dtype = trial.library.dtype_name(inputs[name])
            _require_alike(f"the gradient of {name}", gradient, dtype, trial)
        half = _rows_in_half(trial, wide.inputs)
        _require_same(trial, "the output", out, trial.call(half))
        for name, gradient in trial.automatic(trial.call, half, cotangent).items():
            _require_same(trial, f"the gradient of {name}", automatic[name], gradient)
        pairs = trial.pairs_of(out, explicit) | trial.pairs_of_gradients(automatic, "autograd")
        if tokens is not None:
            pairs["the extended output"] = tokens
        return trial.agree(pairs)


class _Wide(Trial):
    """The trial with float32 arrays, whose values are those rounded to the case's dtype."""

    def arrays(self, arrays: Mapping[str, np.ndarray], dtype: str | None = None) -> Arrays:
        return super().arrays(arrays, "float32")


def _extended(wide: Trial) -> tuple[np.ndarray, np.ndarray] | None:
    """The output of a prefill and one more token under autocast, and the expected output."""
    time = wide.case.layout.t
    if not Caching().applies(wide.case) or time < 2:
        return None
    return extended(wide, [time - 1, time], [wide.backend])


def _rows_in_half(trial: Trial, inputs: Mapping[str, Array]) -> Arrays:
    """The inputs as autocast casts them: gates, weights and the like stay in float32."""
    half = trial.arrays(trial.numpy_inputs)
    return {n: half[n] if trial.mechanism.inputs[n].is_rows else a for n, a in inputs.items()}


def _every_other_in_half(trial: Trial, inputs: Mapping[str, Array]) -> Arrays:
    """Every other input in half precision, as when float32 keys meet half-precision values."""
    half = trial.arrays(trial.numpy_inputs)
    return {n: half[n] if i % 2 else array for i, (n, array) in enumerate(inputs.items())}


def _require_alike(what: str, result: object, dtype: str, trial: Trial) -> None:
    found = trial.library.dtype_name(result)
    if found != dtype:
        raise DisagreementError(f"{what} is of {found}, not of {dtype}")


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
