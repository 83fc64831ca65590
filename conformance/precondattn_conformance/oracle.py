"""The oracle: the reference in float64, on inputs rounded to the case's dtype.

Its gradients are checked by central differences wherever those are accurate enough.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cached_property, lru_cache

import numpy as np

import precondattn as pa
from precondattn.arrays import Arrays
from precondattn_conformance.cancellation import (
    Sizes,
    sizes_of_feature_maps,
    sizes_of_one_query,
    sizes_of_terms,
    sizes_when_overwritten,
    sizes_when_saturated,
)
from precondattn_conformance.declared import is_smooth, is_softmax, mechanism_of
from precondattn_conformance.disagreement import DisagreementError
from precondattn_conformance.extremes import EXTREMES, SATURATED, at_an_extreme
from precondattn_conformance.harmless_keys import with_harmless_keys
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_conformance.libraries import HALF
from precondattn_conformance.memory_order import constant, cotangent_axes

REFERENCE = "reference"
"""The backend of the definitions."""
QUERIES_AND_KEYS = ("q", "k", "q2", "k2", "tau")
"""Inputs whose gradients are nearly 0 if one key or one slot has all the weight."""
OF_WEIGHTS = ("q", "k", "g", "i")
"""Inputs whose gradients are nearly 0 if one token has all the weight, in a state whose weights are
divided by their sum plus a small ε."""
OF_SCORES = (
    *QUERIES_AND_KEYS,
    *("q_gain", "k_gain", "per_dim", "bias", "g", "slopes", "bucket_table"),
    *("w", "beta", "w2", "beta2"),
)
"""Inputs whose gradients are nearly 0 for that reason in softmax without slots: all inputs that
only the scores depend on."""
NEARLY_ZERO = 1e-8
"""A gradient that is smaller than this share of its terms consists of float32 rounding errors."""


class Oracle:
    """The oracle's result: the rounded inputs, the output, a cotangent, and the gradients.

    Gradients are computed, and checked by central differences, when a check first asks for them.
    """

    def __init__(self, mechanism: str, layout: CallLayout, kind: str, dtype: str) -> None:
        self.mechanism, self.layout, self.kind, self.dtype = mechanism, layout, kind, dtype
        self.inputs: Arrays = inputs_of(mechanism, layout, kind, dtype)
        self.masks: Arrays = layout.masks()
        m = mechanism_of(mechanism)
        self.out, self._pullback = m.vjp(**self.inputs, **self.masks, backend=REFERENCE)
        cotangent = rounded(np.random.default_rng(1).normal(size=self.out.shape), dtype)
        cotangent = constant(cotangent, cotangent_axes(layout.order, cotangent.ndim))
        self.cotangent: np.ndarray = np.where(np.isfinite(self.out), cotangent, 0.0)

    @cached_property
    def gradients(self) -> Arrays:
        """The gradient of every input at the cotangent."""
        m = mechanism_of(self.mechanism)
        gradients: Arrays = self._pullback(self.cotangent)
        can_differ = self.kind not in EXTREMES and is_smooth(m, self.kind)
        if can_differ and self.dtype == "float64" and is_certifying(self.layout):
            sum_of_terms = np.sum(np.abs(_finite(self.out) * self.cotangent))
            rounding = float(np.finfo(np.float64).eps * sum_of_terms)
            check_directions(m, self.inputs, self.masks, self.cotangent, gradients, rounding)
        del self._pullback  # It keeps intermediate arrays.
        return gradients

    @cached_property
    def terms(self) -> dict[str, Sizes]:
        """The sizes of the terms of gradients that are sums with cancellation."""
        m, inputs, cotangent = mechanism_of(self.mechanism), self.inputs, self.cotangent
        layout, gradients = self.layout, self.gradients
        terms = sizes_of_terms(m, inputs, cotangent, self.masks)
        of_maps = sizes_of_feature_maps(m, inputs, cotangent, self.masks)
        terms |= of_maps | sizes_of_one_query(m, inputs, cotangent)
        if self.kind in SATURATED or (layout.s == 1 and is_softmax(m)):
            terms |= sizes_when_saturated(inputs, cotangent)
        elif is_softmax(m) or any(isinstance(leaf, pa.GSA) for leaf in m.program.leaves):
            # A query may have all its weight on one key or one slot.
            of_scores = OF_SCORES if is_softmax(m) else QUERIES_AND_KEYS
            for name, size in sizes_when_saturated(inputs, cotangent).items():
                is_only_query = layout.t == 1 and name in {*of_scores, *of_maps}
                if is_only_query or np.max(np.abs(gradients[name])) < NEARLY_ZERO * size:
                    terms[name] = size
        for leaf in m.program.leaves:
            if not isinstance(leaf, pa.MLSTM):
                continue
            for name, size in sizes_when_saturated(inputs, cotangent).items():
                least = (NEARLY_ZERO + leaf.eps) * size
                if name in OF_WEIGHTS and np.max(np.abs(gradients[name])) < least:
                    terms[name] = size
        if self.kind == "extreme_gates" and "contraction" in inputs:
            terms["contraction"] = float(np.max(np.abs(self.out)) * np.max(np.abs(cotangent)))
        if self.kind == "overwritten" and self.dtype in HALF:
            terms |= sizes_when_overwritten(inputs, gradients)
        return terms

    def with_arrays(self, **arrays: object) -> Oracle:
        """A copy with other arrays for some attributes; gradients and terms are computed before."""
        _ = self.gradients, self.terms
        other = copy(self)
        vars(other).update(arrays)
        return other


@lru_cache(maxsize=256)
def oracle(mechanism: str, layout: CallLayout, kind: str, dtype: str) -> Oracle:
    """The results of the reference in float64 on NumPy."""
    return Oracle(mechanism, layout, kind, dtype)


def is_certifying(layout: CallLayout) -> bool:
    """Whether the oracle's gradients are compared with central differences at this layout.

    They are compared at the named layouts. Layouts of the design are wide and long: there central
    differences are expensive, and too inaccurate where a covariance of few tokens is inverted.
    """
    return not layout.block


@lru_cache(maxsize=256)
def inputs_of(mechanism: str, layout: CallLayout, kind: str, dtype: str) -> Arrays:
    """The inputs of a case in float64, rounded to its dtype."""
    m = mechanism_of(mechanism)
    if kind in EXTREMES:
        inputs = at_an_extreme(m, layout, kind, dtype)
    else:
        inputs = make_inputs(m, layout, kind)
    inputs = with_harmless_keys(m, inputs)
    return {name: rounded(array, dtype) for name, array in inputs.items()}


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """The array in float64, rounded to the dtype."""
    if dtype == "bfloat16":
        # Eight bits of mantissa: add half of the last kept bit (ties to even), truncate the rest.
        bits = array.astype(np.float32).view(np.uint32)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    return array.astype(dtype).astype(np.float64)


def _finite(out: np.ndarray) -> np.ndarray:
    """The output with 0 in place of −∞, the logarithm of an empty sum."""
    return np.where(out == -np.inf, 0.0, out)


H = 1e-6
"""The step of central differences."""


def check_directions(
    m: pa.Mechanism,
    x: Arrays,
    masks: Arrays,
    cotangent: np.ndarray,
    gradients: Arrays,
    rounding: float,
) -> None:
    """Compare central differences along random directions of all inputs with the gradients.

    All inputs are moved at once, with the strictest of the bounds of single inputs. If that fails,
    each input is moved alone. `rounding` is the rounding error of the two sums that are subtracted.
    """
    rng = np.random.default_rng(2)
    directions = {name: rng.normal(size=array.shape) for name, array in x.items()}
    if "lengths" in masks:
        directions = {n: np.where(gradients[n] == 0, 0.0, d) for n, d in directions.items()}

    def check(*names: str) -> None:
        def value(step: float) -> float:
            moved = x | {name: x[name] + step * directions[name] for name in names}
            return float(np.sum(_finite(m(**moved, **masks, backend=REFERENCE)) * cotangent))

        pairs = [(gradients[name], directions[name]) for name in names]
        expected = sum(float(np.sum(g * d)) for g, d in pairs)
        size = min(float(np.sqrt(np.sum(g**2) * np.sum(d**2))) for g, d in pairs)
        require_derivative(
            f"the definition of {m} contradicts itself: the gradient of {names[0]} along a random "
            "direction is {expected:.9g} by its `backward`, and {difference:.9g} by central "
            "differences of its `forward`; every check compares with both",
            *(value, expected, 1e-6 * size + rounding / H),
        )

    try:
        check(*x)
    except DisagreementError:
        for name in x:
            check(name)


def require_derivative(
    text: str, value: Callable[[float], float], expected: float, bound: float
) -> None:
    """Raise a DisagreementError if a central difference is not the expected derivative."""
    difference = (value(H) - value(-H)) / (2 * H)
    if not abs(difference - expected) <= bound:
        raise DisagreementError(text.format(expected=expected, difference=difference))
