"""The check `order_of_calls`: calls of equal shapes must not change each other's results."""

from __future__ import annotations

import numpy as np

import precondattn as pa
from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Check, Measured, Pairs, Trial
from precondattn_conformance.declared import mechanism_of
from precondattn_conformance.design.options import at_block, options_of
from precondattn_conformance.disagreement import DisagreementError
from precondattn_conformance.oracle import Oracle, oracle

BLOCK = 16
"""The block size: an option of the mechanism may be a window that is wider than a block."""


class OrderOfCalls(Check):
    """Calls with the same shapes do not affect each other, also through pullbacks or other options.

    Two calls have the same shapes and other values; the first output must not change. Then two
    calls run before either pullback, by `vjp` and by the library's own differentiation. Then the
    mechanism is called with other options on the same inputs, and without them again. This finds
    caches that are keyed by shapes alone.
    """

    name = "order_of_calls"
    snippet = """_, others = call_of(case{where}, turned=True)  # Other values of the same shapes.
out, pullback = mechanism.vjp(**inputs, backend={backend})
mechanism.vjp(**others, backend={backend})
gradients = pullback(out)"""

    def applies(self, case: Case) -> bool:
        return case.layout.mask is None and not case.layout.order

    def run(self, trial: Trial) -> Measured:
        trial.require_outputs()
        worst = [trial.agree(_kept(trial)).error]
        if not trial.no_gradient:
            worst.append(trial.agree(_held(trial)).error)
        for expression in _with_the_same_inputs(trial.case.mechanism):
            worst.append(_in_turn(trial, expression))
        found = {"the output after other options": _output(trial, trial.mechanism, trial.expected)}
        return Measured(max(*worst, trial.agree(found).error), trial.bound)


def _kept(trial: Trial) -> Pairs:
    """The output of a call, read after another call of the same shapes."""
    second = trial.arrays(_turned(trial, trial.numpy_inputs))
    first = trial.call()
    trial.call(second)
    what = "the output of a call before another one of the same shapes"
    return {what: (trial.numpy(first), trial.expected.out)}


def _held(trial: Trial) -> Pairs:
    """The gradients of two calls whose pullbacks are called after both calls."""
    arrays = trial.numpy_inputs
    first, second = trial.inputs, trial.arrays(_turned(trial, arrays))
    cotangents = [
        trial.library.array(array, trial.case.dtype)
        for array in (trial.expected.cotangent, trial.expected.cotangent[::-1].copy())
    ]
    pullbacks = [
        trial.mechanism.vjp(**inputs, backend=trial.backend)[1] for inputs in (first, second)
    ]
    all_gradients = [
        pullback(cotangent) for pullback, cotangent in zip(pullbacks, cotangents, strict=True)
    ]
    expected = [trial.expected.gradients, _turned(trial, trial.expected.gradients)]
    automatic = trial.library.held_gradients(trial.call, [first, second], cotangents)
    return {
        f"the {number} {by} of {name}": (trial.numpy(gradient), right[name])
        for by, results in (("vjp", all_gradients), ("autograd", automatic or ()))
        for number, gradients, right in zip(("first", "second"), results, expected, strict=False)
        for name, gradient in gradients.items()
    }


def _turned(trial: Trial, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays with the sequences of the batch in reversed order."""
    inputs = trial.mechanism.inputs
    return {
        name: array[::-1].copy() if inputs[name].letters[:1] == "b" else array
        for name, array in arrays.items()
    }


def _with_the_same_inputs(expression: str) -> list[str]:
    """Expressions with one other option, whose inputs have the same names and shapes."""
    plain = mechanism_of(expression)
    options = [at_block(text, BLOCK) for text in options_of(expression)]
    return [text for text in options if mechanism_of(text).inputs == plain.inputs]


def _in_turn(trial: Trial, expression: str) -> float:
    """The error of a call with another option, made between two calls without it."""
    case = trial.case
    mechanism = mechanism_of(expression)
    expected = oracle(expression, case.layout, case.kind, trial.precision)
    try:
        found = _output(trial, mechanism, expected)
    except pa.UnsupportedError:
        return 0.0  # A backend may lack this option.
    what = f"the output of {expression}, called after {case.mechanism} with the same shapes,"
    try:
        return trial.agree({what: found}).error
    except DisagreementError as error:
        raise error.saying(
            f"{error}; either the option is ignored, or something is kept by shapes alone"
        ) from None


def _output(
    trial: Trial, mechanism: pa.Mechanism, expected: Oracle
) -> tuple[np.ndarray, np.ndarray]:
    arrays = trial.arrays(expected.inputs)
    return trial.numpy(mechanism(**arrays, backend=trial.backend)), expected.out
