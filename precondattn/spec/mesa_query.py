"""MesaNet's preconditioner: the query that reads a least-squares fit of values by keys.

    q*_t = (H_t + diag λ)⁻¹ q_t,    H_t = e^{g_t} H_{t−1} + β_t k_t k_tᵀ

A linear attention o_t = S_tᵀ q*_t, whose state has the same decay and writes β_t v_t, then reads
the solution of the ridge regression of values on keys. Source: MesaNet (arXiv 2506.05233). λ > 0
has one number for each query head and channel, H the decay of the base: none, one per head, the
mean over channels of one per channel, or retention's.

CCQ's query is its first order: for small Σ / λ, (λ I + Σ)⁻¹ q = (q − Σ q / λ) / λ + O(Σ²).

Gradient, with M = H + diag λ and x = M⁻¹ dq*:

    dq = x,    dλ = −Σ x ∘ q*,    dH_t = −x_t q*_tᵀ,

and that of H through the recurrence: −Σ_t x_tᵀ H_t q*_t is a linear attention of queries q*, keys k
and values β k, with the cotangent −x.

Cache: H, in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Flops, Inputs, options
from precondattn.algebra.flops import state_flops
from precondattn.arrays import Array, Arrays, ByName, namespace
from precondattn.cache import Slot
from precondattn.frame import Frame
from precondattn.spec.array_functions import (
    identity_like,
    repeat_heads,
    row_sum,
    sum_heads,
    swap_time_and_heads,
    transpose,
    where_valid,
)
from precondattn.spec.conditioned_query import KeyStatistics
from precondattn.spec.linear_family import queries_of_rows, queries_of_states, rows_of_states
from precondattn.spec.positive_definite import NotSolvedError, solve_positive
from precondattn.spec.recurrence import Form, Stream

Read = Callable[[Array], Array]
"""H q of queries (…, t, r, d)"""

ITERATIONS = 10
"""Products with H that are counted as the cost of a solve."""


@dataclass(frozen=True)
class MesaQuery(KeyStatistics):
    """q* = (H + diag λ)⁻¹ q, with H the decayed sum of β k kᵀ.

    The definition factorizes the matrix of every token. Blocked backends iterate by conjugate
    gradients on chunks of tokens, and check the residual r of every query,

        ‖r‖ ≤ τ ‖q‖ + 4 ε (tr H + max λ) ‖q*‖,    ε the distance from 1 to the next number.

    Where it is not reached they raise a `NotSolvedError`, or, under JAX and while a CUDA graph
    captures Triton's kernels, the query is NaN.

    Source: MesaNet (arXiv 2506.05233).

    Parameters
    ----------
    decay : {"none", "head", "channel", "retention"}
        How H decays: as the covariance of `ConditionedQuery`.
    beta : bool
        Whether there is an input `beta_mesa`, the β of each key; 1 without it.
    tolerance : float, optional
        τ; by default 1e-6, and 1e-13 in float64.
    iterations : int, optional
        The largest number of iterations; by default 200, or 2 d where that is more.

    Examples
    --------
    >>> import numpy as np
    >>> q, k = np.ones((1, 2, 1, 2)), np.asarray([[1.0, 0.0], [0.0, 2.0]]).reshape(1, 2, 1, 2)
    >>> MesaQuery()(q, k, lam_mesa=np.ones((1, 2)))[0, :, 0]
    array([[0.5, 1. ],
           [0.5, 0.2]])
    """

    name: ClassVar[str] = "mesa_query"
    variants: ClassVar[tuple[str, ...]] = (
        "mesa_query[decay=head,beta=true]",
        "mesa_query[decay=channel]",
        "mesa_query[decay=retention]",
    )

    beta: bool = options.flag(False)
    tolerance: float | None = options.positive_or_none()
    iterations: int | None = options.count_or_none()

    def most_iterations(self, d: int) -> int:
        """The largest number of iterations for keys of width d.

        With exact products d would do. Rounding makes it more for float64's tolerance.
        """
        return max(200, 2 * d) if self.iterations is None else self.iterations

    def not_solved(self, residual: float, iterations: int, tolerance: float) -> NotSolvedError:
        """The error where conjugate gradients left a residual, as a share of a query."""
        return NotSolvedError(
            f"{self}: conjugate gradients left a residual of {residual:.1e} of a query after "
            f"{iterations} iterations, and {tolerance:.0e} is expected; give more iterations, a "
            f"larger tolerance or a larger lam_mesa"
        )

    @property
    def inputs(self) -> Inputs:
        beta = {"beta_mesa": "b s n in [0, 1]"} if self.beta else {}
        return Inputs(
            q="b t h d", k="b s n d unit row", **self._gate, **beta, lam_mesa="h d in [0.25, 4]"
        )

    computes_with_states = True

    def slots(self) -> tuple[Slot, ...]:
        heads, decay = self._heads_and_decay
        beta = ", {beta_mesa}" if self.beta else ""
        history = f"mesa_moment({{k}}{beta}{decay})"
        return (Slot("moment", history, f"b {heads} d d", wide=True, symbol="H"),)

    def flops(self, sizes: Mapping[str, int]) -> Flops:
        """The FLOPs of `ITERATIONS` linear attentions; how many are needed depends on H / λ."""
        d = sizes["d"]
        each = state_flops(sizes["s"], d, d)
        decode = each.decode + 2 / 3 * d**3
        solve = ITERATIONS * each.forward
        return Flops(solve, 2 * solve + each.backward, decode).times(sizes["h"])

    def _stream(self, x: ByName, frame: Frame) -> Stream:
        """The recurrence of H, without queries."""
        g = self.log_decay(x, frame)
        m = g.shape[1]
        # Padded keys are 0 in the call, but not after a feature map.
        k = where_valid(repeat_heads(swap_time_and_heads(x["k"]), m), frame)
        v = k * self._beta(x, m) if self.beta else k
        return Stream(k[:, :, :0, None, :], k, v, g)

    def _beta(self, x: ByName, m: int) -> Array:
        return repeat_heads(swap_time_and_heads(x["beta_mesa"]), m)[..., None]

    def _solved(
        self, x: Stream, state: Array, q: Array, ridge: Array, form: Form
    ) -> tuple[Array, Array]:
        """(H + diag λ)⁻¹ q of queries (b, m, t, r, d), and the final H."""
        iterative = getattr(form, "solve_by_iteration", None)
        if iterative is not None:  # It does not form H of every token.
            solved: tuple[Array, Array] = iterative(self, x, state, q, ridge)
            return solved
        xp = namespace(q)
        one = identity_like(x.k[:, :, :, None, :])
        rows = xp.broadcast_to(one, (*q.shape[:3], *one.shape[3:])) + 0.0 * q[:, :, :, :1, :1]
        moments, final = form.forward(x._replace(q=rows), state)
        matrix = moments[:, :, :, None, ...] + one[:, :, :, None, ...] * ridge[..., None]
        return solve_positive(matrix, q[..., None])[..., 0], final

    def _ridge(self, x: ByName, m: int) -> Array:
        """λ (1, m, 1, r, d)"""
        return queries_of_states(x["lam_mesa"][None, None, ...], m)

    def run(self, state: ByName, x: ByName, frame: Frame, form: Form) -> tuple[Array, Arrays]:
        stream, moment = self._stream(x, frame), _symmetric(state["moment"])
        m = stream.k.shape[1]
        q = queries_of_states(x["q"], m)
        solution, final = self._solved(stream, moment, q, self._ridge(x, m), form)
        return rows_of_states(solution), {"moment": final}

    def run_vjp(
        self, state: ByName, x: ByName, frame: Frame, cotangent: Array, d_state: ByName, form: Form
    ) -> tuple[Arrays, Arrays]:
        xp = namespace(cotangent)
        stream, moment = self._stream(x, frame), _symmetric(state["moment"])
        m, h, n = stream.k.shape[1], x["q"].shape[2], x["k"].shape[2]
        q, ridge = queries_of_states(x["q"], m), self._ridge(x, m)
        solution, _ = self._solved(stream, moment, q, ridge, form)
        d_q, _ = self._solved(stream, moment, queries_of_states(cotangent, m), ridge, form)
        d = form.vjp(stream._replace(q=solution), moment, -d_q, d_state["moment"])
        beta = self._beta(x, m) if self.beta else 1.0
        d_k = where_valid(d.stream.k + beta * d.stream.v, frame)
        gradients = {
            "q": queries_of_rows(d_q, h),
            "k": swap_time_and_heads(sum_heads(d_k, n)),
            "lam_mesa": -xp.sum(queries_of_rows(d_q * solution, h), axis=(0, 1)),
        }
        if self.beta:
            d_beta = row_sum(where_valid(d.stream.v * stream.k, frame))[..., 0]
            gradients["beta_mesa"] = swap_time_and_heads(sum_heads(d_beta, n))
        gradients |= self._gate_gradient(x, d.stream.g)
        return gradients, {"moment": _symmetric(d.state)}


def _symmetric(state: Array) -> Array:
    """H of a cache is symmetric; any other matrix counts as its symmetric part."""
    return 0.5 * (state + transpose(state))
