"""The forget gate: scores that decay with every token between the key and the query.

    S_ij ← S_ij + D_ij,    D_ij = Σ_{j<τ≤i} g_τ,    g ≤ 0

g is the logarithm of the gate. Source: Forgetting Transformer (arXiv 2503.02130) Eq. 4. There are
two conventions for the factor s of the logits:

    unscaled:   S = s A + D        the paper's
    scaled:     S = s (A + D)      flash-linear-attention's PaTH

D is summed for each key separately. A difference of cumulative sums, G_i − G_j, would lose the
digits of all gates that follow a nearly closed one.

Gradient: dg_τ = Σ_{j<τ≤i} dS_ij.

Cache: for each key the decay since that key, D_j = Σ_{τ>j} g_τ, rewritten with every token.
"""

from __future__ import annotations

from precondattn.arrays import Array, arange_like, namespace, zero_where_not
from precondattn.cache import Rewrite, Slot, Update

SLOT = Slot("decay", "decay({g})", "b c h", wide=True, is_rewritten=True)


def _follows(array: Array, s: int) -> Array:
    """Whether token τ follows token j (s, s)."""
    token = arange_like(s, array)
    return token[:, None] > token[None, :]


def decay(g: Array, t: int) -> Array:
    """D_ij for the last t tokens i and all tokens j (b, h, t, s), 0 for j ≥ i; g (b, s, h)."""
    xp = namespace(g)
    s = g.shape[1]
    gates = zero_where_not(_follows(g, s), xp.permute_dims(g, (0, 2, 1))[..., None])
    return xp.cumulative_sum(gates, axis=2)[:, :, s - t :, :]


def decay_vjp(d_decay: Array) -> Array:
    """dg (b, s, h) from the gradient of `decay` (b, h, t, s)."""
    xp = namespace(d_decay)
    t, s = d_decay.shape[-2:]
    zeros = xp.zeros_like(d_decay[:, :, :1, :])
    zeros = xp.broadcast_to(zeros, (*d_decay.shape[:2], s - t, s))
    d_rows = xp.flip(xp.concat([zeros, d_decay], axis=2), axis=2)
    d_gates = xp.flip(xp.cumulative_sum(d_rows, axis=2), axis=2)
    d_g = xp.sum(zero_where_not(_follows(d_decay, s), d_gates), axis=-1)
    return xp.permute_dims(d_g, (0, 2, 1))


def extended_decay(past: Array, g: Array) -> tuple[Array, Update]:
    """The decay for new queries (b, h, t, c + t), and the update of the cached decay (b, c, h)."""
    xp = namespace(g)
    total = xp.permute_dims(xp.cumulative_sum(g, axis=1), (0, 2, 1))
    since = xp.permute_dims(past, (0, 2, 1))
    among_new = decay(g, g.shape[1])
    to_past = total[:, :, :, None] + since[:, :, None, :]
    update = Rewrite(
        xp.permute_dims(since + total[:, :, -1:], (0, 2, 1)),
        xp.permute_dims(among_new[:, :, -1, :], (0, 2, 1)),
    )
    return xp.concat([to_past, among_new], axis=-1), update
