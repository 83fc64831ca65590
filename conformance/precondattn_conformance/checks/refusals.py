"""The check `refusals`: how a backend declines calls."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import fields
from functools import cache

import precondattn as pa
from precondattn.algebra.mechanism import leaf_of
from precondattn.arrays import Array, Arrays, Residuals
from precondattn.frame import Frame
from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Check, Measured, Pairs, Trial
from precondattn_conformance.declared import mechanism_of
from precondattn_conformance.disagreement import DisagreementError

ADVICE = (
    "Decline it: decide by `type(mechanism) is` or `==`, not by isinstance, name or options. Or "
    "run the leaf's own methods"
)


class Refusals(Check):
    """A refusal has a reason, and a backend does not claim a leaf that it can not know.

    The backend is offered a leaf with the same options but different mathematics, of a class
    derived from the one it knows: output and gradients are twice as large. A backend that decides
    by `isinstance`, by name or by options claims the leaf and returns its parent's results. A
    backend that declines the leaf is right, and so is one that runs the leaf's own code.
    """

    name = "refusals"
    snippet = """from precondattn_conformance.checks.refusals import derived_from

derived = derived_from(mechanism)  # Its output is twice as large.
print(derived.explain(**inputs, backend=({listed}, "reference")))  # Who computes it?"""

    def applies(self, case: Case) -> bool:
        return len(mechanism_of(case.mechanism).program.leaves) == 1

    def run(self, trial: Trial) -> Measured:
        if trial.under_test is None:
            raise pa.UnsupportedError("refusals are tested with --backend NAME only")
        explanation = trial.mechanism.explain(**trial.inputs, **trial.masks, backend=trial.backend)
        trial.require_used(explanation)
        for considered in explanation.plan.considered:
            support = considered.support
            if considered.backend == trial.under_test and not (
                support.ok or support.reason.strip()
            ):
                raise DisagreementError(
                    f"{trial.under_test} declines without a reason; `prepare` must return one that "
                    "tells the user what to change"
                )
        derived = derived_from(trial.mechanism)
        try:
            out, pullback = derived.vjp(**trial.inputs, **trial.masks, backend=trial.backend)
            gradients = pullback(trial.cotangent())
        except pa.UnsupportedError:
            return Measured(0.0, trial.bound)
        except Exception as error:
            raise DisagreementError(
                f"{trial.under_test} claims {_described(derived)}, and raises "
                f"{type(error).__name__}: {error}. {ADVICE}",
                traceback.format_exc(limit=-4),
            ) from error
        return _agree(trial, derived, trial.pairs_of(out, gradients))


def _agree(trial: Trial, derived: pa.Mechanism, pairs: Pairs) -> Measured:
    """The error of results that should be twice the oracle's, and not equal to them."""
    twice = {what: (result, 2 * expected) for what, (result, expected) in pairs.items()}
    terms = {name: 2 * size for name, size in trial.expected.terms.items()}
    try:
        return trial.agree(twice, terms)
    except DisagreementError as error:
        what = error.what
        parent = type(derived).__mro__[1].__name__
        try:
            trial.agree({what: pairs[what]})
        except DisagreementError:
            message = f"{trial.under_test} is wrong on {_described(derived)}: {error}. {ADVICE}"
        else:
            message = (
                f"{trial.under_test} takes {_described(derived)} for {parent} itself: {what} is "
                f"that of {parent}. {ADVICE}"
            )
        raise error.saying(message) from None


def _described(derived: pa.Mechanism) -> str:
    parent = type(derived).__mro__[1].__name__
    return f"a derived leaf (a class derived from {parent} that overrides its methods)"


@cache
def _class_twice_as_large(cls: type[pa.Leaf]) -> type[pa.Leaf]:
    """An unregistered subclass with its base's name."""

    def forward(self: pa.Leaf, x: Mapping[str, Array], frame: Frame) -> tuple[Array, Residuals]:
        out, residuals = cls.forward(self, x, frame)
        return 2 * out, residuals

    def backward(
        self: pa.Leaf,
        x: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        return cls.backward(self, x, frame, out / 2, residuals, 2 * cotangent)

    methods = {"forward": forward, "backward": backward}
    return type(f"TwiceAsLarge{cls.__name__}", (cls,), methods)


def derived_from(mechanism: pa.Mechanism) -> pa.Mechanism:
    """A derived leaf of the mechanism's only leaf; output and gradients are twice as large."""
    leaf = leaf_of(mechanism.program.calls[0])
    options = {field.name: getattr(leaf, field.name) for field in fields(leaf) if field.init}
    cls = _class_twice_as_large(type(leaf))  # type: ignore[arg-type]  # A class is hashable.
    derived: pa.Leaf = cls(**options)
    return derived
