"""The forget gate: scores that fade with every token between the key and the query.

    S_ij ← S_ij + D_ij,    D_ij = Σ_{j<τ≤i} g_τ,    g ≤ 0

g is the logarithm of the gate. Source: Forgetting Transformer (arXiv 2503.02130) Eq. 4. Where the
factor s of the logits stands makes a difference:

    unscaled:   S = s A + D        the paper's
    scaled:     S = s (A + D)      flash-linear-attention's PaTH

D is summed for each key by itself. As a difference of cumulative sums, G_i − G_j, it would lose
the digits of every gate behind one that is nearly closed.

Gradient: dg_τ = Σ_{j<τ≤i} dS_ij.

Cache: for each key the decay since, D_j = Σ_{τ>j} g_τ, rewritten with every token.
"""

from __future__ import annotations

from precondattn.arrays import Array, arange_like, namespace, zero_where_not
from precondattn.cache import Rewrite, Slot, Update

SLOT = Slot("decay", "decay({g})", "b c h", wide=True)


def _behind(array: Array, s: int) -> Array:
    """Whether token τ stands behind token j (s, s)."""
    token = arange_like(s, array)
    return token[:, None] > token[None, :]


def decay(g: Array, t: int) -> Array:
    """D_ij for the last t tokens i and all tokens j (b, h, t, s), 0 for j ≥ i; g (b, s, h)."""
    xp = namespace(g)
    s = g.shape[1]
    each = zero_where_not(_behind(g, s), xp.permute_dims(g, (0, 2, 1))[..., None])
    return xp.cumulative_sum(each, axis=2)[:, :, s - t :, :]


def decay_vjp(d_decay: Array) -> Array:
    """dg (b, s, h) from the gradient of `decay` (b, h, t, s)."""
    xp = namespace(d_decay)
    t, s = d_decay.shape[-2:]
    before = xp.zeros_like(d_decay[:, :, :1, :])
    before = xp.broadcast_to(before, (*d_decay.shape[:2], s - t, s))
    d_rows = xp.flip(xp.concat([before, d_decay], axis=2), axis=2)
    d_each = xp.flip(xp.cumulative_sum(d_rows, axis=2), axis=2)
    d_g = xp.sum(zero_where_not(_behind(d_decay, s), d_each), axis=-1)
    return xp.permute_dims(d_g, (0, 2, 1))


def extended_decay(past: Array, g: Array) -> tuple[Array, Update]:
    """The decay of new queries (b, h, t, c + t), and the update of the past's (b, c, h)."""
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
