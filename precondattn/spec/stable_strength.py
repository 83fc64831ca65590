"""Strengths with which a delta rule is stable for keys of any length.

The delta rule is one explicit step of the flow dS/dt = k (β v − Sᵀ β k)ᵀ, over t = 1. Along k it
multiplies the state by 1 − c, with c = β ‖k‖², and diverges for c > 2. A step that is stable is a
delta rule too, whose strength is φ(c) β:

    implicit:  φ(c) = 1 / (1 + c),          along k: 1 / (1 + c)
    exact:     φ(c) = (1 − e^{−c}) / c,     along k: e^{−c}

Implicit is the minimiser of ½ ‖S − S'‖² + ½ β ‖Sᵀ k − v‖², exact the solution of the flow. With a
strength b to erase each channel and w to write one, the flow is dS/dt = k (w ∘ v − Sᵀ (b ∘ k))ᵀ:
c = Σ b k², and φ(c) multiplies b and w. Sources: Longhorn (arXiv 2407.14207), implicit;
error-free linear attention (arXiv 2512.12602), exact. Gradient, with D that of the output:

    dβ = D (c φ)'(c),    dk = 2 k Σ D β² φ'(c),        (c φ)' = φ² or e^{−c},
    implicit: φ' = −φ²,  exact: φ' = (e^{−c} − φ) / c = −½ + c/3 − c²/8 + …
"""

from __future__ import annotations

from dataclasses import dataclass
from math import factorial
from typing import ClassVar

from precondattn.algebra import Inputs, TokenWise, options
from precondattn.arrays import Array, Arrays, ByName, Residuals, namespace
from precondattn.frame import Frame
from precondattn.spec.array_functions import row_sum

SMALL = 0.5
"""The c below which φ' is a sum of powers, because the difference in it cancels."""

POWERS = tuple((-1) ** n * n / factorial(n + 1) for n in range(1, 15))
"""The coefficients of 1, c, c², … in φ'. The next term is below 1e-17 for c = ½."""


def _factor(rule: str, c: Array) -> Array:
    """φ(c)."""
    xp = namespace(c)
    if rule == "implicit":
        return 1.0 / (1.0 + c)
    return xp.where(c == 0, 1.0, -xp.expm1(-c) / xp.where(c == 0, 1.0, c))


def _slope(rule: str, c: Array) -> Array:
    """φ'(c)."""
    xp, factor = namespace(c), _factor(rule, c)
    if rule == "implicit":
        return -factor * factor
    # Either branch is finite where the other is taken, also in its own derivative.
    small, large = xp.clip(c, max=SMALL), xp.clip(c, min=SMALL)
    series = xp.zeros_like(c)
    for power in reversed(POWERS):
        series = series * small + power
    return xp.where(c < SMALL, series, (xp.exp(-large) - _factor(rule, large)) / large)


def _squares(k: Array) -> Array:
    """k², finite so that a strength of 0 times it is 0."""
    xp = namespace(k)
    return xp.clip(k * k, max=float(xp.finfo(k.dtype).max))


def _for_values(array: Array, u: int) -> Array:
    """An array of key heads (b, s, h, …), repeated for u value heads."""
    group = u // array.shape[2]
    return array if group == 1 else namespace(array).repeat(array, group, axis=2)


def _of_keys(array: Array, h: int) -> Array:
    """The transpose: sums over the value heads (b, s, u, d) of each of h key heads."""
    b, s, u, d = array.shape
    xp = namespace(array)
    return array if u == h else xp.sum(xp.reshape(array, (b, s, h, u // h, d)), axis=3)


@dataclass(frozen=True)
class StableBeta(TokenWise):
    """β φ(c), with c = β ‖k‖²: φ = 1 / (1 + c), or (1 − e^{−c}) / c.

    `k` (b, s, h, d) may be of any length, and `beta` (b, s, u) any number that is not negative.
    There are as many value heads as key heads, or a multiple.

    Source: Longhorn (arXiv 2407.14207); error-free linear attention (arXiv 2512.12602).

    Parameters
    ----------
    rule : {"implicit", "exact"}
        φ = 1 / (1 + c), or (1 − e^{−c}) / c.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> k, beta = np.full((1, 1, 1, 4), 1.5), np.ones((1, 1, 1))  # ‖k‖² = 9
    >>> pa.StableBeta()(k, beta=beta).item()
    0.1
    """

    name: ClassVar[str] = "stable_beta"
    variants: ClassVar[tuple[str, ...]] = ("stable_beta[rule=exact]",)
    allows_any_length: ClassVar[frozenset[str]] = frozenset({"k"})

    rule: str = options.choice("implicit", "exact")

    inputs = Inputs(k="b s h d", beta="b s u in [0, inf)")
    output = "b s u"

    def _c(self, x: ByName) -> Array:
        square = row_sum(_squares(x["k"]))
        xp = namespace(square)
        square = xp.clip(square, max=float(xp.finfo(square.dtype).max))
        return x["beta"] * _for_values(square, x["beta"].shape[2])[..., 0]

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        return x["beta"] * _factor(self.rule, self._c(x)), ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        xp, beta, h, c = namespace(out), x["beta"], x["k"].shape[2], self._c(x)
        if self.rule == "implicit":
            d_beta, d_square = _factor(self.rule, c) ** 2, -out * out
        else:
            d_beta, d_square = xp.exp(-c), beta * (beta * _slope(self.rule, c))
        d_square = _of_keys((cotangent * d_square)[..., None], h)
        return {"k": x["k"] * (2.0 * d_square), "beta": cotangent * d_beta}


@dataclass(frozen=True)
class StableChannels(TokenWise):
    """b ∘ φ(c) or w ∘ φ(c), with c = Σ b k²: φ = 1 / (1 + c), or (1 − e^{−c}) / c.

    `k` (b, s, h, d) may be of any length, and `b` (b, s, u, d) is not negative. `w` (b, s, u, e) is
    read where it is what is multiplied.

    Source: That of `StableBeta`, for strengths of channels.

    Parameters
    ----------
    rule : {"implicit", "exact"}
        φ = 1 / (1 + c), or (1 − e^{−c}) / c.
    of : {"b", "w"}
        What is multiplied.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> k, b = np.full((1, 1, 1, 4), 1.5), np.ones((1, 1, 1, 4))
    >>> pa.StableChannels()(k, b=b).ravel()
    array([0.1, 0.1, 0.1, 0.1])
    """

    name: ClassVar[str] = "stable_channels"
    variants: ClassVar[tuple[str, ...]] = (
        "stable_channels[of=w]",
        "stable_channels[rule=exact]",
        "stable_channels[rule=exact,of=w]",
    )
    allows_any_length: ClassVar[frozenset[str]] = frozenset({"k"})

    rule: str = options.choice("implicit", "exact")
    of: str = options.choice("b", "w")

    @property
    def inputs(self) -> Inputs:
        written = {"w": "b s u e in [0, inf)"} if self.of == "w" else {}
        return Inputs(k="b s h d", b="b s u d in [0, inf)", **written)

    @property
    def output(self) -> str:  # type: ignore[override]
        return "b s u d" if self.of == "b" else "b s u e"

    def _squares_of(self, x: ByName) -> Array:
        return _for_values(_squares(x["k"]), x["b"].shape[2])

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        return x[self.of] * _factor(self.rule, row_sum(x["b"] * self._squares_of(x))), ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        squares, (h, u) = self._squares_of(x), (x["k"].shape[2], x["b"].shape[2])
        c = row_sum(x["b"] * squares)
        d_c = row_sum(cotangent * x[self.of]) * _slope(self.rule, c)
        d_own, d_b = cotangent * _factor(self.rule, c), squares * d_c
        d_k = _of_keys(_for_values(x["k"], u) * (2.0 * x["b"] * d_c), h)
        if self.of == "b":
            return {"k": d_k, "b": d_own + d_b}
        return {"k": d_k, "b": d_b, "w": d_own}
