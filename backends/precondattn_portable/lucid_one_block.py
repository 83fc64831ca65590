"""LUCID's triangular system in one block: few tokens, whose matrix is solved as it is.

(I + diag(β) stril(Φ)) y = diag(β) v,    Φ_ij = e^{s ⟨k̂_i, k̂_j⟩ − s d}
"""

from __future__ import annotations

from collections.abc import Mapping

import precondattn as pa
from precondattn.arrays import Array, namespace, zero_where_not
from precondattn.frame import Frame
from precondattn.spec.array_functions import transpose
from precondattn.spec.metric import DOT
from precondattn.spec.rms_norm import rms
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.layout import ROW_BLOCK_ENTRIES, block_size, time_first
from precondattn_portable.triangular_inverse import solve_unit_lower


def is_one_block(leaf: pa.LucidSolve, x: Mapping[str, Array]) -> bool:
    """Whether the tokens fit a block, and the matrix has a unit diagonal and plain scores."""
    b, s, n, _ = x["k"].shape
    is_plain = leaf.metric == DOT and leaf.has_unit_diagonal
    return is_plain and s == block_size(s) and b * n * s * s <= ROW_BLOCK_ENTRIES


def solve_one_block(
    ops: Arithmetic, leaf: pa.LucidSolve, x: Mapping[str, Array], frame: Frame
) -> Array:
    """y (b, s, n, e)."""
    k, right = ops.heads_first(x["k"]), time_first(x["v"])
    unit = k / rms(k, leaf.eps) if leaf.normalize == "keys" else k
    scale, d = leaf.scale_for(k.shape[3]), k.shape[3]
    phi = ops.product(unit * scale, transpose(unit))
    phi = _strictly_below(ops, leaf, ops.exp(ops.subtract(phi, scale * d)), frame)
    beta = _beta(ops, leaf, x, frame)
    if beta is not None:
        phi, right = ops.multiply(phi, beta), beta * right
    return time_first(solve_unit_lower(ops, phi, right))


def _strictly_below(ops: Arithmetic, leaf: pa.LucidSolve, phi: Array, frame: Frame) -> Array:
    """Φ, 0 on and above the diagonal, outside the window and at keys of other segments."""
    if leaf.window is None and frame.k_segment is None:
        return ops.lower(phi, -1)
    among_keys = frame.replaced(k_valid=None).among_keys(phi.shape[3])
    visible = among_keys.visible(causal=True, window=leaf.window, strict=True)
    return ops.keep(phi, namespace(phi).broadcast_to(visible, phi.shape), 0.0)


def _beta(
    ops: Arithmetic, leaf: pa.LucidSolve, x: Mapping[str, Array], frame: Frame
) -> Array | None:
    """β (b, n, s, 1), 0 at padding, so that y is 0 there too; None where it is 1."""
    beta = ops.heads_first(x["lucid_beta"])[..., None] if leaf.beta else None
    valid = frame.valid_keys(x["k"].shape[1])
    if valid is None:
        return beta
    valid = valid[:, None, :, None]
    one = namespace(valid).ones_like(valid, dtype=x["k"].dtype) if beta is None else beta
    return zero_where_not(valid, one)
