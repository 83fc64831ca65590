"""LUCID's preconditioner: values decorrelated by the keys, by a triangular solve.

    E y = diag(β) v,    E = I + diag(β) stril(Φ),    Φ_ij = exp(s ⟨RN(k_i), RN(k_j)⟩ − s d)

Attention then reads y in place of v: o = softmax(s q kᵀ + mask) y. With β = 1, ε = 0 this is Eq. 2
of LUCID, since there diag(Φ) = 1; here the diagonal is set to 1 and not computed. The shift s·d
makes Φ ≤ 1. One solve serves all query heads of a key/value head.

As a recurrence: y_t = β_t (v_t − Σ_{j<t} Φ_tj y_j).

LUCID's Table 5 and Table 1 have two variants without a unit diagonal and without a bound:

    rows:    E_ij = exp(s ⟨k_i, k_j⟩ − m_i),  m_i = max_{j≤i} s ⟨k_i, k_j⟩
    none:    E_ij = exp(s ⟨k_i, k_j⟩)

Gradient, with Eᵀ X = dy:

    dv = β∘X,    dβ_t = X_t·(v_t − Σ_{j<t} Φ_tj y_j),    dE = −(β∘X) yᵀ below the diagonal,

then through exp, the metric, and the norm. `rows` adds dm_i = X_i·v_i at the first maximum.

Cache: the keys, y, and rms(k), but not v.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from precondattn.algebra import Flops, Inputs, Leaf, options
from precondattn.algebra.flops import visible_keys, visible_pairs
from precondattn.arrays import arange_like, cast, namespace, nonempty, stop_gradient, zero_where_not
from precondattn.cache import Append, Slot, Updates
from precondattn.frame import Frame
from precondattn.frameworks.types import Array, Arrays, ByName, Residuals
from precondattn.spec.array_functions import (
    finite_or_zero,
    identity_like,
    mask_scores,
    row_sum,
    solve_lower,
    solve_upper,
    swap_time_and_heads,
    transpose,
)
from precondattn.spec.metric import DOT, Metric, cached_keys
from precondattn.spec.rms_norm import rms, rms_norm_vjp
from precondattn.spec.transported import metric_option


class TriangularSystem(NamedTuple):
    """The triangular system of one call: rows are the t tokens whose y is computed."""

    strict: Array
    """Φ (in the variants `rows` and `none` E), strictly below the diagonal (b, n, t, s)."""
    diagonal: Array
    """The diagonal of E (b, n, t, 1)."""
    beta: Array
    """β (b, n, t, 1)."""
    at_maximum: Array | None
    """Whether an entry is the first maximum of its row (b, n, t, s); only in the variant `rows`."""

    def matrix(self) -> Array:
        """E restricted to the last t keys."""
        t, s = self.strict.shape[-2:]
        strict = self.strict[..., s - t :]
        return identity_like(strict) * self.diagonal + self.beta * strict


@dataclass(frozen=True)
class LucidSolve(Leaf):
    """y with (I + diag(β) stril(Φ)) y = diag(β) v, Φ = exp(s ⟨RN(k), RN(k)⟩ − s d).

    Source: LUCID Eq. 2, 3.2–3.4; variants: Table 1, Table 5.

    Parameters
    ----------
    metric : Metric
        The score function ⟨·, ·⟩, which is that of the base.
    scale : float, optional
        The scale s; d^{-1/2} by default.
    window : int, optional
        Φ_ij is 0 unless i − j < window. A window above 2^30 is none.
    normalize : {"keys", "given", "rows", "none"}
        "keys": keys are normalised here. "given": they are normalised before. "rows" and "none":
        the two unbounded variants, which divide each row by its maximum or by nothing.
    eps : float
        In the norm: rms(k) = √(mean(k²) + eps).
    beta : bool
        Whether there is an input `lucid_beta` in [0, 2]; for normalised keys only.
    detach_max : bool
        Whether the maximum of "rows" is constant for the gradient.

    Examples
    --------
    Equal keys turn values into differences: y_t = v_t − v_{t−1}.

    >>> import numpy as np
    >>> k = np.ones((1, 4, 1, 8))
    >>> v = np.asarray([1.0, 4.0, 9.0, 16.0]).reshape(1, 4, 1, 1)
    >>> LucidSolve(eps=0)(k, v).ravel().round(6)
    array([1., 3., 5., 7.])
    """

    name: ClassVar[str] = "lucid_solve"
    role: ClassVar[str] = "piece"
    variants: ClassVar[tuple[str, ...]] = (
        "lucid_solve[beta=true]",
        "lucid_solve[window=3]",
        "lucid_solve[normalize=rows]",
        "lucid_solve[normalize=none]",
        "lucid_solve[metric=transported]",
    )

    metric: Metric = metric_option(DOT)
    scale: float | None = options.positive_or_none()
    window: int | None = options.window_or_none()
    normalize: str = options.choice("keys", "given", "rows", "none")
    eps: float = options.non_negative(1e-6)
    beta: bool = options.flag(False)
    detach_max: bool = options.flag(False)

    output = "b s n e"

    def refuses_mask(self, name: str) -> str | None:
        return "lucid's triangular solve relates keys to earlier keys, in causal order"

    def check_together(self) -> None:
        if self.beta and not self.has_unit_diagonal:
            raise ValueError(
                f"lucid_solve: beta is defined with a unit diagonal only, that is with "
                f"normalize='keys' or 'given'; found normalize={self.normalize!r}"
            )

    @property
    def has_unit_diagonal(self) -> bool:
        return self.normalize in ("keys", "given")

    @property
    def inputs(self) -> Inputs:
        beta: dict[str, str] = {"lucid_beta": "b s n in [0, 2]"} if self.beta else {}
        return Inputs(k="b s n d", v="b s n e", **self.metric.inputs, **beta)

    def meaning(self, name: str) -> object:
        return self.metric if name in self.metric.inputs else super().meaning(name)

    def flops(self, sizes: Mapping[str, int]) -> Flops | None:
        """The FLOPs of attention of the keys to themselves, once for each key/value head."""
        s, d, e = sizes["s"], sizes["d"], sizes["e"]
        keys = visible_keys(s, self.window)
        each = self.metric.flops(visible_pairs(s, s, window=self.window), keys, d, e)
        # A cached key is transported once, for the base.
        return each._replace(decode=2.0 * keys * (d + e)).times(sizes["n"])

    def _extra(self, x: ByName) -> Arrays:
        return {name: swap_time_and_heads(x[name]) for name in self.metric.inputs}

    def _rms(self, k: Array) -> Array:
        """The number r by which every key is divided in the scores (b, n, s, 1)."""
        return rms(k, self.eps) if self.normalize == "keys" else namespace(k).ones_like(k[..., :1])

    def _system(self, x: ByName, scores: Array, frame: Frame) -> TriangularSystem:
        """The system from the unscaled scores (b, n, t, s) of the keys."""
        xp = namespace(scores)
        d = x["k"].shape[3]
        scores = self.scale_for(d) * scores
        below = frame.visible(causal=True, window=self.window, strict=True)
        one = xp.ones_like(row_sum(scores[..., :1]))  # A sum has a column even without keys.
        valid = one > 0
        if frame.q_valid is not None:
            valid = valid & frame.q_valid[:, None, :, None]
        if self.has_unit_diagonal:
            shifted = mask_scores(below, scores - self.scale_for(d) * d)
            beta = swap_time_and_heads(x["lucid_beta"])[..., None] if self.beta else one
            return TriangularSystem(xp.exp(shifted), one, zero_where_not(valid, beta), None)

        t, s = scores.shape[-2:]
        column = arange_like(s, scores)[None, None, None, :]
        on_diagonal = arange_like(t, scores)[None, None, :, None] + (s - t) == column
        scores = mask_scores(below | (on_diagonal & valid), scores)
        at_maximum = None
        if self.normalize == "rows":
            largest = xp.argmax(nonempty(scores, -1), axis=-1)[..., None]
            at_maximum = cast(largest, xp.int32) == column
            maximum = row_sum(xp.where(at_maximum, finite_or_zero(scores), 0.0))
            scores = scores - (stop_gradient(maximum) if self.detach_max else maximum)
        weights = xp.exp(scores)
        diagonal = row_sum(zero_where_not(on_diagonal, weights))
        # Everything in a row of padding is masked; a unit diagonal keeps the system regular.
        diagonal = xp.where(valid, diagonal, 1.0)
        return TriangularSystem(
            zero_where_not(below, weights), diagonal, zero_where_not(valid, one), at_maximum
        )

    def _full_system(self, x: ByName, frame: Frame) -> TriangularSystem:
        k = swap_time_and_heads(x["k"])
        normed = k / self._rms(k)
        frame = frame.among_keys(k.shape[2])
        return self._system(x, self.metric.scores(normed, normed, self._extra(x), frame), frame)

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        system = self._full_system(x, frame)
        v = swap_time_and_heads(x["v"])
        return swap_time_and_heads(solve_lower(system.matrix(), system.beta * v)), ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        k, v = swap_time_and_heads(x["k"]), swap_time_and_heads(x["v"])
        y, extra = swap_time_and_heads(out), self._extra(x)
        system = self._full_system(x, frame)
        solved = solve_upper(transpose(system.matrix()), swap_time_and_heads(cotangent))
        d_v = system.beta * solved

        # d_scores is the gradient of the exponents, before the scale.
        exponentials = system.strict
        if not self.has_unit_diagonal:
            exponentials = exponentials + identity_like(exponentials) * system.diagonal
        d_scores = -(d_v @ transpose(y)) * exponentials
        if system.at_maximum is not None and not self.detach_max:
            d_maximum = row_sum(d_v * v)
            d_scores = d_scores + zero_where_not(system.at_maximum, d_maximum)

        normed = k / self._rms(k)
        d_left, d_right, d_extra = self.metric.vjp(
            normed,
            normed,
            extra,
            frame.among_keys(k.shape[2]),
            self.scale_for(k.shape[3]) * d_scores,
        )
        d_k = d_left + d_right
        if self.normalize == "keys":
            d_k = rms_norm_vjp(k, self.eps, d_k)
        gradients = {"k": swap_time_and_heads(d_k), "v": swap_time_and_heads(d_v)}
        gradients |= {name: swap_time_and_heads(d) for name, d in d_extra.items()}
        if self.beta:
            d_beta = row_sum(solved * (v - system.strict @ y))[..., 0]
            gradients["lucid_beta"] = swap_time_and_heads(d_beta)
        return gradients

    def slots(self) -> tuple[Slot, ...]:
        slots = (*self.metric.slots(), Slot("solved", "{out}", "b c n e"))
        if self.normalize != "keys":
            return slots
        eps = "" if self.eps == type(self).eps else f"[eps={options.text_of(self.eps)}]"
        return (*slots, Slot("rms", f"rms{eps}({{k}})", "b c n", wide=True))

    def step(self, past: ByName, x: ByName, frame: Frame) -> tuple[Array, Updates]:
        xp = namespace(x["k"])
        k, v = swap_time_and_heads(x["k"]), swap_time_and_heads(x["v"])
        past_y = swap_time_and_heads(past["solved"])
        past_keys = cached_keys(self.metric, past)
        r, past_r = self._rms(k), xp.ones_like(past_y[..., :1])
        if self.normalize == "keys":
            # The norm of the original key: the cached key may have been transported since.
            past_r = swap_time_and_heads(past["rms"])[..., None]
            past_r = xp.where(past_r > 0, past_r, 1.0)
        among_keys = frame.among_keys(k.shape[2])
        scores = self.metric.scores(k / r, k, self._extra(x), among_keys, past_keys)
        scores = scores / transpose(xp.concat([past_r, r], axis=2))
        system = self._system(x, scores, among_keys)

        capacity = past_y.shape[2]
        residual = v - system.strict[..., :capacity] @ past_y
        y = swap_time_and_heads(solve_lower(system.matrix(), system.beta * residual))
        updates = self.metric.advance(past_keys, k, self._extra(x), frame)
        updates["solved"] = Append(y)
        if self.normalize == "keys":
            updates["rms"] = Append(swap_time_and_heads(r)[..., 0])
        return y, updates
