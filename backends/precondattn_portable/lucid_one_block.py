"""LUCID's triangular system for few tokens: one block, whose matrix is stored and solved.

(I + diag(β) stril(Φ)) y = diag(β) v,    Φ_ij = e^{s ⟨k̂_i, k̂_j⟩ − s d}
"""

from __future__ import annotations

import precondattn as pa
from precondattn.arrays import Array, Arrays, arange_like, namespace
from precondattn.frame import Frame
from precondattn.spec.array_functions import where_valid
from precondattn.spec.metric import DOT
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.layout import block_size, time_first
from precondattn_portable.triangular_inverse import solve_unit_lower


def has_plain_matrix(leaf: pa.LucidSolve) -> bool:
    """Whether the matrix has a unit diagonal and plain scores."""
    return leaf.metric == DOT and leaf.has_unit_diagonal


def is_one_block(ops: Arithmetic, x: Arrays) -> bool:
    """Whether the tokens fit a block."""
    b, s, n, _ = x["k"].shape
    return bool(s == block_size(ops.sizes, s) and b * n * s * s <= ops.sizes.row_block_entries)


def solve_one_block(ops: Arithmetic, leaf: pa.LucidSolve, x: Arrays, frame: Frame) -> Array:
    """y (b, s, n, e)."""
    k, right, d = ops.heads_first(x["k"]), ops.swapped(x["v"]), x["k"].shape[3]
    unit = k / ops.rms(k, leaf.eps) if leaf.normalize == "keys" else k
    scale = leaf.scale_for(d)
    phi = ops.exp(ops.subtract(ops.product(unit * scale, ops.transposed(unit)), scale * d))
    phi = strictly_below(ops, phi, leaf.window, frame.k_segment)
    beta = strengths(ops, leaf, x, frame)
    if beta is not None:
        phi, right = ops.multiply(phi, beta), beta * right
    return ops.swapped(solve_unit_lower(ops, phi, right))


def strictly_below(ops: Arithmetic, phi: Array, window: int | None, segment: Array | None) -> Array:
    """Φ (b, n, …, size, size) of blocks of keys, without the diagonal and masked pairs."""
    if window is None and segment is None:
        return ops.lower(phi, -1)
    token = arange_like(phi.shape[-1], phi)
    distance = token[:, None] - token[None, :]
    visible = distance > 0
    if window is not None:
        visible = visible & (distance < window)
    xp = namespace(phi)
    if segment is not None:
        segment = xp.reshape(segment, (segment.shape[0], 1, *phi.shape[2:-1]))
        visible = visible & (segment[..., :, None] == segment[..., None, :])
    return ops.keep(phi, xp.broadcast_to(visible, phi.shape), 0.0)


def strengths(ops: Arithmetic, leaf: pa.LucidSolve, x: Arrays, frame: Frame) -> Array | None:
    """β (b, n, s, 1), 0 at padding, so that y is 0 there too; None where it is 1."""
    if leaf.beta:
        return where_valid(ops.heads_first(x["lucid_beta"])[..., None], frame)
    if frame.valid_keys(x["k"].shape[1]) is None:
        return None
    k = time_first(x["k"])
    return where_valid(namespace(k).ones_like(k[..., :1]), frame)
