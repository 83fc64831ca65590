"""What a check is: a name, what it holds a backend to, and how closely."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

import precondattn as pa
from precondattn.dispatch.explanation import Explanation
from precondattn_conformance.case import Case
from precondattn_conformance.declared import mechanism_of
from precondattn_conformance.disagreement import DisagreementError, agree
from precondattn_conformance.libraries import Library
from precondattn_conformance.oracle import Oracle, inputs_of, oracle
from precondattn_conformance.tolerance import bound

FLOAT16_MAX = 65504.0
Backend = str | tuple[str, ...] | None
Pairs = Mapping[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Measured:
    """How far a result was from the oracle, and how far it may be."""

    error: float
    bound: float


@dataclass(frozen=True)
class Trial:
    """A case with what a check needs to run it."""

    case: Case
    library: Library
    backend: Backend

    @cached_property
    def mechanism(self) -> pa.Mechanism:
        return mechanism_of(self.case.mechanism)

    @cached_property
    def expected(self) -> Oracle:
        case = self.case
        return oracle(case.mechanism, case.layout, case.kind, case.dtype)

    @property
    def values(self) -> dict[str, np.ndarray]:
        """The inputs; without asking the oracle, which is in vain for what a backend declines."""
        case = self.case
        return inputs_of(case.mechanism, case.layout, case.kind, case.dtype)

    @property
    def opposite(self) -> dict[str, np.ndarray]:
        """Other values, as valid as these: the sequences in the opposite order."""
        return {name: a[::-1] if a.ndim else a for name, a in self.values.items()}

    @property
    def bound(self) -> float:
        """The largest error that is admissible."""
        return bound(self.case.dtype, self.case.kind)

    @cached_property
    def inputs(self) -> dict[str, Any]:
        return self.arrays(self.values)

    @cached_property
    def masks(self) -> dict[str, Any]:
        return {n: self.library.array(a) for n, a in self.case.layout.masks().items()}

    @property
    def under_test(self) -> str | None:
        """The first backend named; the others may help it, not replace it."""
        return self.backend[0] if isinstance(self.backend, tuple) else self.backend

    def arrays(self, values: Mapping[str, np.ndarray], dtype: str | None = None) -> dict[str, Any]:
        """In the library under test and the case's dtype."""
        chosen = dtype or self.case.dtype
        return {name: self.library.array(array, chosen) for name, array in values.items()}

    def numpy(self, array: Any) -> np.ndarray:
        return self.library.numpy(array)

    def takes(self, explanation: Explanation) -> bool:
        """Whether the backend under test takes some of the work."""
        return self.under_test is None or self.under_test in explanation.backends

    def require_work(self, explanation: Explanation) -> None:
        """Raise an UnsupportedError where the backend under test takes nothing."""
        if not self.takes(explanation):
            raise pa.UnsupportedError(f"{self.under_test} takes nothing of this:\n{explanation}")

    def explain(self, verb: str = "forward", **named: Any) -> None:
        """Refuse a full call, or its gradient, of which the backend takes nothing."""
        explanation = self.mechanism.explain(
            **self.inputs, **self.masks, backend=self.backend, verb=verb, **named
        )
        self.require_work(explanation)

    def call(self, inputs: Mapping[str, Any] | None = None) -> Any:
        """The output."""
        return self.mechanism(**(inputs or self.inputs), **self.masks, backend=self.backend)

    def vjp(
        self,
        inputs: Mapping[str, Any] | None = None,
        *,
        order: str | None = None,
        twice: bool = False,
    ) -> tuple[Any, dict[str, Any]]:
        """The output, and the gradients at the oracle's cotangent, which is not written to.

        The cotangent is a view of an order, if one is given; `twice` asks for them a second time.
        """
        out, pullback = self.mechanism.vjp(
            **(inputs or self.inputs), **self.masks, backend=self.backend
        )
        cotangent = self.library.array(self.expected.cotangent, self.case.dtype)
        if order is not None:
            cotangent = self.library.view(cotangent, order)
        gradients = pullback(cotangent)
        if twice:
            gradients = pullback(cotangent)
        if not np.array_equal(self.numpy(cotangent), self.expected.cotangent):
            raise DisagreementError("the cotangent was written to")
        return out, gradients

    def require_purity(self) -> None:
        """Inputs are never written to."""
        for name, array in self.inputs.items():
            if not np.array_equal(self.numpy(array), self.expected.inputs[name]):
                raise DisagreementError(f"the input {name} was written to")

    def agree(self, pairs: Pairs, terms: Mapping[str, float] | None = None) -> Measured:
        """The worst error of results by what they are, each with what the oracle says."""
        limit = self.bound
        worst = 0.0
        for what, (found, expected) in pairs.items():
            size = (terms or {}).get(what, 0.0)
            axes = self._axes(what)
            found = _as_far_as_it_goes(found, expected, self.case.dtype)
            worst = max(worst, agree(what, found, expected, limit, terms=size, axes=axes))
        return Measured(worst, limit)

    def pairs_of_gradients(self, gradients: Mapping[str, Any], by: str = "vjp") -> Pairs:
        """Gradients by "vjp of q", each with the oracle's."""
        expected = self.expected.gradients
        return {f"{by} of {n}": (self.numpy(g), expected[n]) for n, g in gradients.items()}

    def terms_of_gradients(self) -> dict[str, float]:
        """The sizes of gradients that are sums whose terms cancel."""
        terms = self.expected.terms
        return {f"{by} of {name}": terms[name] for by in ("vjp", "autograd") for name in terms}

    def _axes(self, what: str) -> str:
        name = what.rpartition(" of ")[2]
        if name in self.mechanism.inputs:
            return "".join(axis.letter for axis in self.mechanism.inputs[name].axes)
        return "bthe" if "output" in what else ""


def _as_far_as_it_goes(found: np.ndarray, expected: np.ndarray, dtype: str) -> np.ndarray:
    """What was found, with the expected value where float16 can only say that it is infinite."""
    if dtype != "float16" or found.shape != expected.shape:
        return found
    is_beyond = (np.abs(expected) > FLOAT16_MAX) & (found == np.copysign(np.inf, expected))
    return np.where(is_beyond, expected, found)


class Check:
    """One thing that a backend is held to.

    Subclasses have a docstring that says what and why, which the documentation shows.
    """

    name: ClassVar[str]
    snippet: ClassVar[str] = "out = mechanism(**inputs, backend={backend})"
    """How a reader calls it, once `mechanism` and `inputs` are there."""

    def applies(self, case: Case) -> bool:
        """Whether it has a meaning for this mechanism and this data."""
        return True

    def run(self, trial: Trial) -> Measured:
        """The worst error, or a DisagreementError, or the backend's UnsupportedError."""
        raise NotImplementedError

    @property
    def anchor(self) -> str:
        """Its section in the documentation."""
        return f"conformance.md#{self.name}"
