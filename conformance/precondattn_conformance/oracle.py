"""The oracle: the reference in float64, on inputs rounded to the case's dtype.

Its gradients are checked by central differences wherever those are accurate enough.
"""

from __future__ import annotations

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
            arguments = m, self.inputs, self.masks, self.cotangent
            sum_of_terms = np.sum(np.abs(_finite(self.out) * self.cotangent))
            rounding = float(np.finfo(np.float64).eps * sum_of_terms)
            for name in self.inputs:
                check_direction(*arguments, name, gradients[name], rounding)
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


def check_direction(
    m: pa.Mechanism,
    x: Arrays,
    masks: Arrays,
    cotangent: np.ndarray,
    name: str,
    g: np.ndarray,
    rounding: float,
) -> None:
    """Compare one central difference along a random direction of one input with the gradient.

    `rounding` is the rounding error of the two sums that are subtracted.
    """
    direction = np.random.default_rng(2).normal(size=x[name].shape)
    if masks.keys() & {"lengths"}:
        direction = np.where(g == 0, 0.0, direction)
    h = 1e-6

    def value(sign: float) -> float:
        moved = {**x, name: x[name] + sign * h * direction}
        return float(np.sum(_finite(m(**moved, **masks, backend="reference")) * cotangent))

    difference, expected = (value(1) - value(-1)) / (2 * h), float(np.sum(g * direction))
    size = float(np.sqrt(np.sum(g**2) * np.sum(direction**2)))
    if not abs(difference - expected) <= 1e-6 * size + rounding / h:
        raise DisagreementError(
            f"the definition of {m} contradicts itself: the gradient of {name} along a random "
            f"direction is {expected:.9g} by its `backward`, and {difference:.9g} by central "
            f"differences of its `forward`; every check compares with both"
        )
