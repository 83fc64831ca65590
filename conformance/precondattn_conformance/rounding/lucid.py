"""The rounding of a tensor-core kernel of LUCID's solve.

Unit keys are rounded to float16, which has 11 bits and whose range suffices for them. Scores are
summed in float32 and exponentiated in float32. The solve, 64 tokens at a time,

    y_i = M_i (β v_i − L_i y),    M_i = (I + L_ii)⁻¹,    L = diag(β) stril(Φ),

multiplies in tf32: L, M, y and the right-hand sides keep 10 bits of their fraction. M is computed
without rounding and then rounded. The gradient solves with Lᵀ likewise, and rounds dΦ ∘ Φ to the
dtype of the call before its products with the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import precondattn as pa
from precondattn.arrays import Array, namespace
from precondattn.frame import Frame
from precondattn.spec.array_functions import (
    identity_like,
    row_sum,
    solve_lower,
    solve_upper,
    swap_time_and_heads,
    transpose,
)
from precondattn.spec.lucid import TriangularSystem
from precondattn.spec.rms_norm import rms_norm_vjp
from precondattn_conformance.rounding.attention import Rounding

BLOCK = 64


class Roundings(NamedTuple):
    """Rounding functions: to the dtype of the call, to float16, and to the bits of tf32."""

    call: Rounding
    float16: Rounding
    tf32: Rounding


def forward(leaf: pa.LucidSolve, x: Mapping[str, Array], frame: Frame, to: Roundings) -> Array:
    """The output y with rounding."""
    _, _, system = _system(leaf, x, frame, to)
    right = system.beta * swap_time_and_heads(x["v"])
    return swap_time_and_heads(_solved(system.beta * system.strict, right, to.tf32, lower=True))


def backward(
    leaf: pa.LucidSolve,
    x: Mapping[str, Array],
    frame: Frame,
    out: Array,
    cotangent: Array,
    to: Roundings,
) -> dict[str, Array]:
    """The gradients of keys, values and β with rounding."""
    k, unit, system = _system(leaf, x, frame, to)
    v, y = swap_time_and_heads(x["v"]), swap_time_and_heads(out)
    upper = transpose(system.beta * system.strict)
    solved = _solved(upper, swap_time_and_heads(cotangent), to.tf32, lower=False)
    d_v = system.beta * solved
    d_scores = -(to.tf32(d_v) @ transpose(to.tf32(y))) * system.strict
    d_scores = to.call(leaf.scale_for(k.shape[3]) * d_scores)
    d_k = d_scores @ unit + transpose(d_scores) @ unit
    if leaf.normalize == "keys":
        d_k = rms_norm_vjp(k, leaf.eps, d_k)
    gradients = {"k": d_k, "v": d_v}
    if leaf.beta:
        gradients["lucid_beta"] = row_sum(solved * (v - system.strict @ y))[..., 0]
    return {name: swap_time_and_heads(d) for name, d in gradients.items()}


def _system(
    leaf: pa.LucidSolve, x: Mapping[str, Array], frame: Frame, to: Roundings
) -> tuple[Array, Array, TriangularSystem]:
    """Keys, unit keys, and the triangular system."""
    k = swap_time_and_heads(x["k"])
    unit = to.float16(k / leaf._rms(k))
    system = leaf._system(x, unit @ transpose(unit), frame.among_keys(k.shape[2]))
    return k, unit, system


def _solved(strict: Array, right: Array, tf32: Rounding, *, lower: bool) -> Array:
    """(I + strict)⁻¹ right, for a matrix that is strictly lower or strictly upper triangular."""
    xp = namespace(right)
    strict = tf32(strict)
    tokens, solve = right.shape[2], solve_lower if lower else solve_upper
    starts = list(range(0, tokens, BLOCK))
    done: dict[int, Array] = {}
    for start in starts if lower else reversed(starts):
        rows = slice(start, min(start + BLOCK, tokens))
        rest = right[:, :, rows, :]
        for other, y in done.items():
            rest = rest - strict[:, :, rows, other : other + y.shape[2]] @ tf32(y)
        one = identity_like(strict[:, :, rows, rows])
        inverse = solve(one + strict[:, :, rows, rows], one + 0 * strict[:, :, rows, rows])
        done[start] = tf32(inverse) @ tf32(rest)
    return xp.concat([done[start] for start in starts], axis=2)
