"""The base class of the checks, and the trial that each check runs on: a case with its arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import numpy as np

import precondattn as pa
from precondattn.arrays import Array, Arrays
from precondattn.dispatch.explanation import Explanation
from precondattn.spec.mesa_query import MesaQuery
from precondattn_conformance.cancellation import Sizes
from precondattn_conformance.case import Case
from precondattn_conformance.conventions import EMPTY_ROWS, FLOAT64, meaning, without_empty_rows
from precondattn_conformance.declared import mechanism_of
from precondattn_conformance.disagreement import DisagreementError, agree, require_unchanged
from precondattn_conformance.extremes import EXTREMES
from precondattn_conformance.libraries import Library
from precondattn_conformance.memory_order import cotangent_axes, in_order, laid_out
from precondattn_conformance.oracle import Oracle, inputs_of, oracle
from precondattn_conformance.rounding.model import errors_of_model
from precondattn_conformance.tolerance import SMALLEST, bound, error

FLOAT16_MAX = 65504.0
Backend = str | tuple[str, ...] | None
Pairs = dict[str, tuple[np.ndarray, np.ndarray]]

VJP = """out, pullback = mechanism.vjp(**inputs, backend={backend})
gradients = pullback(expected_of(case{where}).cotangent)"""
"""Snippet code that makes a call and computes its gradient."""


def names_of(backend: Backend) -> tuple[str, ...]:
    """The names of the backends, the one under test first."""
    return (backend,) if isinstance(backend, str) else tuple(backend or ())


@dataclass(frozen=True)
class Measured:
    """The largest error of a result, and its bound."""

    error: float
    bound: float
    outputs_only: str = ""
    """The reason why only outputs were compared, in a check that also compares gradients."""


@dataclass(frozen=True)
class Trial:
    """A case ready to run: its arrays, its mechanism and the backend under test."""

    case: Case
    library: Library
    backend: Backend
    unpromised: frozenset[str] = frozenset()
    """Conventions on which results must not depend, as they are not promised (`conventions.py`)."""

    @cached_property
    def mechanism(self) -> pa.Mechanism:
        return mechanism_of(self.case.mechanism)

    @cached_property
    def expected(self) -> Oracle:
        case = self.case
        expected = oracle(case.mechanism, case.layout, case.kind, self.precision)
        return without_empty_rows(case, expected) if EMPTY_ROWS in self.unpromised else expected

    @property
    def precision(self) -> str:
        """The dtype to which the numbers of the case are rounded, and which determines the
        bounds."""
        is_float32 = FLOAT64 in self.unpromised and self.case.dtype == "float64"
        return "float32" if is_float32 else self.case.dtype

    @property
    def numpy_inputs(self) -> dict[str, np.ndarray]:
        """The inputs in NumPy. Unlike the oracle, they are cheap to make for a case that is
        declined."""
        case = self.case
        return inputs_of(case.mechanism, case.layout, case.kind, self.precision)

    @property
    def reversed_inputs(self) -> dict[str, np.ndarray]:
        """Different inputs of the same shapes: the sequences of the batch in reversed order."""
        return {name: a[::-1] if a.ndim else a for name, a in self.numpy_inputs.items()}

    @property
    def bound(self) -> float:
        """The largest allowed error."""
        return bound(self.precision, self.case.kind)

    @cached_property
    def inputs(self) -> Arrays:
        """The inputs in the layout's order in memory."""
        return self.laid_out(self.numpy_inputs)

    @cached_property
    def masks(self) -> Arrays:
        return {n: self.library.array(a) for n, a in self.case.layout.masks().items()}

    @property
    def under_test(self) -> str | None:
        """The first named backend. The others may compute parts for it, but not replace it."""
        return self.backend[0] if isinstance(self.backend, tuple) else self.backend

    def arrays(self, arrays: Mapping[str, np.ndarray], dtype: str | None = None) -> Arrays:
        """NumPy arrays as arrays of the case's library and dtype."""
        dtype = dtype or self.case.dtype
        return {name: self.library.array(array, dtype) for name, array in arrays.items()}

    def laid_out(self, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """Inputs, or inputs of new tokens, in the library and in the layout's order in memory."""
        order = self.case.layout.order
        return laid_out(self.library, self.mechanism, self.arrays(arrays), arrays, order)

    def cotangent(self) -> Array:
        """The oracle's cotangent in the library, in the layout's order in memory."""
        array = self.library.array(self.expected.cotangent, self.case.dtype)
        order = self.case.layout.order
        values = self.expected.cotangent
        return in_order(self.library, array, values, order, cotangent_axes(order, array.ndim))

    def numpy(self, array: Array) -> np.ndarray:
        return self.library.numpy(array)

    def is_used(self, explanation: Explanation) -> bool:
        """Whether the backend under test runs some part of a call."""
        return self.under_test is None or self.under_test in explanation.backends

    def require_used(self, explanation: Explanation) -> None:
        """Raise an UnsupportedError if the backend under test runs no part of a call."""
        if not self.is_used(explanation):
            text = f"{self.under_test} supports none of this:\n{explanation}"
            error = pa.UnsupportedError(text)
            error.request = explanation.request
            raise error

    def require_support(self, verb: str = "forward") -> None:
        """Raise an UnsupportedError if the backend runs no part of a full call, or of its vjp.

        Without a backend under test, the call itself raises it.
        """
        if self.under_test is None:
            return
        explanation = self.mechanism.explain(
            **self.inputs, **self.masks, backend=self.backend, verb=verb
        )
        self.require_used(explanation)

    @cached_property
    def no_gradient(self) -> str:
        """The reason why the backend runs no part of a call's gradient; empty if it runs a part.

        Raises an UnsupportedError if it runs no part of the call either.
        """
        try:
            self.require_support("vjp")
        except pa.UnsupportedError as declined:
            self.require_support()
            return str(declined)
        return ""

    @property
    def outputs_only(self) -> str:
        """The reason from `no_gradient`, if the check asked for it; else empty."""
        return str(vars(self).get("no_gradient", ""))

    def require_outputs(self) -> None:
        """Raise an UnsupportedError if the backend runs no part of a call without gradient."""
        _ = self.no_gradient

    def call(self, inputs: Mapping[str, Array] | None = None) -> Array:
        """The output of the call."""
        return self.mechanism(**(inputs or self.inputs), **self.masks, backend=self.backend)

    def vjp(
        self,
        inputs: Mapping[str, Array] | None = None,
        *,
        order: str | None = None,
    ) -> tuple[Array, Arrays]:
        """The output, and the gradients at the oracle's cotangent, which may not be written to.

        With an `order`, the cotangent is a view (`Library.view`).
        """
        out, pullback = self.mechanism.vjp(
            **(inputs or self.inputs), **self.masks, backend=self.backend
        )
        cotangent = self.cotangent()
        if order is not None:
            cotangent = self.library.view(cotangent, order)
        gradients = pullback(cotangent)
        self.require_same_cotangent(cotangent)
        return out, gradients

    def results(
        self,
        inputs: Mapping[str, Array] | None = None,
        *,
        order: str | None = None,
    ) -> tuple[Array, Arrays]:
        """The result of `vjp`, or the output without gradients if the backend has none."""
        return (self.call(inputs), {}) if self.no_gradient else self.vjp(inputs, order=order)

    def automatic(
        self, function: Callable[[Arrays], Array], inputs: Arrays, cotangent: Array
    ) -> Arrays:
        """Gradients by the library's own differentiation; empty without any."""
        if self.no_gradient:
            return {}
        return self.library.gradients(function, inputs, cotangent) or {}

    def require_same_cotangent(self, cotangent: Array) -> None:
        """Raise a DisagreementError if the cotangent was written to."""
        after, before = self.numpy(cotangent), self.expected.cotangent
        require_unchanged("the cotangent", after, before, self.axes("the output"))

    def require_dtype(self, what: str, result: Array, dtype: str) -> None:
        """Raise a DisagreementError if a result is of another dtype."""
        if (actual := self.library.dtype_name(result)) != dtype:
            raise DisagreementError(f"{what} is of {actual}, not of {dtype}")

    def require_purity(self) -> None:
        """Raise a DisagreementError if an input was written to."""
        for name, array in self.inputs.items():
            what, before = f"the input {name}", self.expected.inputs[name]
            require_unchanged(what, self.numpy(array), before, self.axes(f"the array of {name}"))

    def agree(
        self,
        pairs: Pairs,
        terms: Mapping[str, Sizes] | None = None,
        model: Callable[[], Mapping[str, float]] | None = None,
    ) -> Measured:
        """The worst error among pairs (result, expected), given by name.

        `terms` are the sizes of the terms of gradients that cancel, by input; those of the oracle
        by default. `model` returns the errors that rounding causes, by the names of the pairs, for
        results of other calls than the plain call and its gradient. It is called if a bound is
        exceeded.
        """
        worst = Measured(0.0, self.bound)
        smallest = SMALLEST[self.precision]
        for what, (result, exact) in pairs.items():
            size: Sizes = 0.0
            if (name := what.rpartition(" of ")[2]) in self.mechanism.inputs:
                size = (self.expected.terms if terms is None else terms).get(name, 0.0)
            result, expected = self._without_left_out(what, result, exact)
            result = _without_overflow(result, expected, self.case.dtype)
            limit = self.bound_of(what)
            same_shape = result.shape == expected.shape
            found = error(result, expected, size, smallest) if same_shape else np.nan
            if not found <= limit:  # The error may be NaN.
                error_of_model = model().get(what) if model else None
                if error_of_model is None:
                    error_of_model = self._error_of_model(what, exact)
                limit = max(limit, 2 * error_of_model)
                axes = self.axes(what)
                found = agree(
                    what, result, expected, limit, terms=size, smallest=smallest, axes=axes
                )
            if found / limit >= worst.error / worst.bound:
                worst = Measured(found, limit)
        return worst

    def _without_left_out(
        self, what: str, result: np.ndarray, expected: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """A result and the expected one, with 0 in rows that see no key, if these are left out.

        Raises an UnsupportedError if such rows make a gradient NaN, since no part of a gradient can
        be left out.
        """
        if EMPTY_ROWS not in self.unpromised or result.shape != expected.shape:
            return result, expected
        is_spoilt = self._is_gradient(what) and not np.isfinite(result).all()
        if is_spoilt and np.isnan(self.expected.out).any():
            promise = f"{self.under_test} does not promise {meaning(EMPTY_ROWS)}"
            raise pa.UnsupportedError(f"{promise}: {what} is not finite")
        is_left_out = np.isnan(expected)
        return np.where(is_left_out, 0.0, result), np.where(is_left_out, 0.0, expected)

    def _is_gradient(self, what: str) -> bool:
        """Whether a result is a gradient, by its name such as "vjp of q"."""
        name = what.rpartition(" of ")[2]
        return name in self.mechanism.inputs or name in self.mechanism.program.slots

    def bound_of(self, what: str) -> float:
        """The bound of the result with this name."""
        m = self.mechanism
        rules = [leaf.declares for leaf in m.program.leaves if isinstance(leaf, pa.Stateful)]
        is_delta = any(rule is not None and not rule.is_diagonal for rule in rules)
        return bound(
            self.precision,
            self.case.kind,
            is_delta_gradient=is_delta and self._is_gradient(what),
            inverts=any(isinstance(leaf, pa.Nystrom | MesaQuery) for leaf in m.program.leaves),
        )

    def _error_of_model(self, what: str, expected: np.ndarray) -> float:
        """The error that rounding causes in a result of the oracle's computation, or 0."""
        case, oracle_results = self.case, self.expected
        if self.precision == "float64" or case.kind in EXTREMES:
            return 0.0
        errors = partial(errors_of_model, case.mechanism, case.layout, case.kind, self.precision)
        if expected is oracle_results.out:
            return errors().out
        name = what.rpartition(" of ")[2]
        return errors().gradients[name] if oracle_results.gradients.get(name) is expected else 0.0

    def pairs_of_gradients(self, gradients: Mapping[str, Array], by: str = "vjp") -> Pairs:
        """Pairs of gradients and the oracle's gradients, by names such as "vjp of q"."""
        return {
            f"{by} of {name}": (self.numpy(gradient), self.expected.gradients[name])
            for name, gradient in gradients.items()
        }

    def pairs_of(
        self, out: Array, gradients: Mapping[str, Array] | None = None, by: str = "vjp"
    ) -> Pairs:
        """The pair of an output and the oracle's, and those of gradients."""
        pairs = {"the output": (self.numpy(out), self.expected.out)}
        return pairs | self.pairs_of_gradients(gradients or {}, by)

    def axes(self, what: str) -> str:
        """The letters of the axes of a result, given by its name such as "vjp of q"."""
        name = what.rpartition(" of ")[2]
        if name in self.mechanism.inputs:
            return "".join(axis.letter for axis in self.mechanism.inputs[name].axes)
        return "bthe" if "output" in what else ""


def _without_overflow(result: np.ndarray, expected: np.ndarray, dtype: str) -> np.ndarray:
    """The result, with expected elements in place of infinite ones from float16 overflow."""
    if dtype != "float16" or result.shape != expected.shape:
        return result
    is_beyond = (np.abs(expected) > FLOAT16_MAX) & (result == np.copysign(np.inf, expected))
    return np.where(is_beyond, expected, result)


class NotRunError(Exception):
    """Raised if the check can not run here, for a reason that is not the backend's."""


class Check:
    """One property that a backend must have.

    The documentation shows the docstrings of the subclasses.
    """

    name: ClassVar[str]
    snippet: ClassVar[str] = "out = mechanism(**inputs, backend={backend})"
    """Code that makes the call, given `case`, `mechanism` and `inputs`."""
    is_plain: ClassVar[bool] = False
    """Whether the results are those of the plain call, or of its gradient."""

    def applies(self, case: Case) -> bool:
        """Whether the check is meaningful for this mechanism and this data."""
        return True

    def run(self, trial: Trial) -> Measured:
        """Run the check; returns the worst error.

        Raises DisagreementError, the backend's UnsupportedError, or NotRunError.
        """
        raise NotImplementedError
