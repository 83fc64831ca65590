"""Diagnosis of a function whose plain call is wrong: the convention that it may follow instead.

The oracle computes the output under each convention (`conventions.py`). Those that agree with the
function are reported; if several agree equally well, all of them are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

import precondattn as pa
from precondattn.backend import Request
from precondattn.frame import full_frame
from precondattn_conformance.case import Case
from precondattn_conformance.conventions import needed
from precondattn_conformance.functions.backend import FunctionBackend
from precondattn_conformance.functions.conventions import Inputs, by_oracle, guesses
from precondattn_conformance.inputs import PLAIN, CallLayout, make_inputs
from precondattn_conformance.libraries import named
from precondattn_conformance.tolerance import bound

GROUPED = PLAIN._replace(t=7, s=7, e=8, values_per_head=1)
EQUAL = GROUPED._replace(n=4)
FEWER = EQUAL._replace(t=4, s=7)
CALLS = {"": (GROUPED, EQUAL), "with fewer queries than keys": (FEWER,)}
"""Sizes of the diagnosed calls. Of several sizes, the first that the function supports is used."""
BETTER = 100.0
"""A convention explains a difference if it reduces the error by at least this factor."""
AS_WELL = 4.0
"""Two conventions fit equally well if their errors differ by less than this factor."""

IN_FLOAT32 = "it computes in float32"


class Finding(NamedTuple):
    """A call that is wrong as declared, and the conventions under which it is right."""

    call: str
    error: float
    """The error relative to the largest entry."""
    explained: tuple[tuple[str, float], ...]
    """The conventions with their errors, best first."""

    def __str__(self) -> str:
        wrong = f"wrong as declared ({_short(self.error)}{self.call and ', '}{self.call})"
        if not self.explained:
            return f"{wrong}, and no known convention explains it"
        texts = " or if ".join(sentence for sentence, _ in self.explained)
        return f"{wrong}, right to {_short(self.explained[0][1])} if {texts}"


def diagnosis(backend: FunctionBackend) -> list[Finding]:
    """The wrong calls of a function, each with the conventions that explain it."""
    findings = []
    for what, layouts in CALLS.items():
        for layout in layouts:
            if layout is FEWER and backend.mechanism.recurrence is not None:
                continue  # Functions of a recurrence take as many queries as keys.
            call = _Call.of(backend, layout)
            if call is not None:
                finding = call.finding(what)
                if finding is not None:
                    findings.append(finding)
                break
    return findings


class _Call:
    """A small call of the function, with its inputs in float64 on the host."""

    def __init__(
        self, backend: FunctionBackend, layout: CallLayout, library: str, dtype: str
    ) -> None:
        self.backend, self.dtype, self.layout = backend, dtype, layout
        self.library = named(library)
        made = make_inputs(backend.mechanism, layout, "random", seed=3)
        rounded = self._numpy(made)
        self.inputs: Inputs = rounded

    @classmethod
    def of(cls, backend: FunctionBackend, layout: CallLayout) -> _Call | None:
        """The call in the first dtype that the function supports; None if there is none.

        Calls that need a convention which the function does not promise are left out.
        """
        patterns, unpromised = backend.mechanism.inputs, pa.CONVENTIONS - backend.promises
        shapes = tuple((name, tuple(p.shape(layout.sizes))) for name, p in patterns.items())
        for library in sorted(backend.libraries):
            for dtype in ("float64", "float32", "bfloat16", "float16"):
                case = Case("outputs", str(backend.mechanism), library, dtype, layout, "random")
                if dtype not in named(library).dtypes or needed(case) & unpromised:
                    continue
                request = Request("forward", library, "cpu", dtype, shapes, frozenset())
                if not backend.refusal(backend.mechanism, request):
                    return cls(backend, layout, library, dtype)
        return None

    def _numpy(self, arrays: Mapping[str, np.ndarray]) -> Inputs:
        """The arrays in float64, rounded to the dtype of the call."""
        with self.library.precision(self.dtype):
            return {
                name: self.library.numpy(self.library.array(array, self.dtype))
                for name, array in arrays.items()
            }

    def output(self, given: Inputs | None = None, layout: str | None = None) -> np.ndarray | None:
        """The function's output; None if it raises an error."""
        backend, x = self.backend, self.inputs if given is None else given
        before = backend.arrangement
        if layout is not None:
            backend.arrangement = replace(before, layout=layout)
        try:
            with self.library.precision(self.dtype):
                arrays = {n: self.library.array(a, self.dtype) for n, a in x.items()}
                t, s = self.layout.t, self.layout.s
                frame = full_frame(t, s, next(iter(arrays.values())))
                return self.library.numpy(backend.call(backend.mechanism, arrays, frame)[0])
        except Exception:  # A guess with which the function can not be called is no explanation.
            return None
        finally:
            backend.arrangement = before

    def finding(self, what: str) -> Finding | None:
        """The finding for a wrong call; None if the call is right."""
        backend = self.backend
        limit = 10 * bound(self.dtype, "random")
        plain = self.output()
        error = _distance(plain, by_oracle(backend.mechanism, self.inputs))
        if error <= limit:
            return None
        rounded = 10 * bound("float32", "random") if self.dtype == "float64" else 0.0
        found = sorted(self._explained(plain, error))
        exact = [each for each in found if each[0] <= limit * 10]
        if not exact and error <= rounded:
            exact = [(error, IN_FLOAT32)]
        elif not exact and rounded:
            exact = [(e, f"{s}, and {IN_FLOAT32}") for e, s in found if e <= rounded * 10]
            limit = rounded
        best = exact[0][0] if exact else 0.0
        fitting = tuple((s, e) for e, s in exact if e <= AS_WELL * max(best, limit / 100))
        return Finding(what, error, fitting)

    def _explained(self, plain: np.ndarray | None, error: float) -> Iterator[tuple[float, str]]:
        """The conventions that greatly reduce the error, each after its remaining error."""
        backend = self.backend
        for guess in guesses(backend.mechanism, self.inputs, backend.arrangement.layout):
            is_plain = guess.given is None and guess.layout is None
            out = plain if is_plain else self.output(guess.given, guess.layout)
            try:
                by_guess = _distance(out, guess.expected())
            except ValueError:  # The mechanism refuses such inputs.
                continue
            if by_guess <= error / BETTER:
                yield by_guess, guess.sentence


def _distance(out: np.ndarray | None, expected: np.ndarray) -> float:
    """The largest error relative to the largest entry; infinite if the result is not finite."""
    if out is None or out.shape != expected.shape or not np.isfinite(out).all():
        return math.inf
    return float(np.abs(out - expected).max() / max(np.abs(expected).max(), 1e-300))


def _short(error: float) -> str:
    return "not finite" if math.isinf(error) else f"{error:.1g}" if error < 0.1 else f"{error:.2g}"
