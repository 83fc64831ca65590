"""The forget gate: scores that fade with every token between the key and the query.

    S_ij ← S_ij + Σ_{j<τ≤i} g_τ = S_ij + G_i − G_j,    G = cumsum(g),  g ≤ 0

g is the logarithm of the gate. Source: Forgetting Transformer (arXiv 2503.02130) Eq. 4. Where the
factor s of the logits stands makes a difference:

    unscaled:   S = s A + (G_i − G_j)        the paper's
    scaled:     S = s (A + G_i − G_j)        flash-linear-attention's PaTH

Gradient: dG_i = Σ_j dS_ij at queries, −Σ_i dS_ij at keys; dg = revcumsum(dG).

Cache: for each key the decay since, D_j = Σ_{τ>j} g_τ. It is rewritten with every token, so that
it stays exact for recent keys however long the sequence is.
"""

from __future__ import annotations

from precondattn.arrays import Array, namespace
from precondattn.cache import Rewrite, Slot, Update

SLOT = Slot("decay", "decay({g})", "b c h", wide=True)


def decay(g: Array, t: int) -> Array:
    """G_i − G_j for the last t tokens i and all tokens j: (b, h, t, s), from g (b, s, h).

    Positive above the diagonal, so that it has to be masked before it is exponentiated.
    """
    total = _cumulative(g)
    return total[:, :, total.shape[2] - t :, None] - total[:, :, None, :]


def decay_vjp(d_decay: Array) -> Array:
    """dg (b, s, h) from the gradient of `decay` (b, h, t, s)."""
    xp = namespace(d_decay)
    t, s = d_decay.shape[-2:]
    at_queries = xp.sum(d_decay, axis=-1)
    before = xp.zeros_like(d_decay[:, :, 0, : s - t])
    d_total = xp.concat([before, at_queries], axis=2) - xp.sum(d_decay, axis=-2)
    d_g = xp.flip(xp.cumulative_sum(xp.flip(d_total, axis=2), axis=2), axis=2)
    return xp.permute_dims(d_g, (0, 2, 1))


def extended_decay(past: Array, g: Array) -> tuple[Array, Update]:
    """The decay of new queries (b, h, t, c + t), and the update of the past's (b, c, h)."""
    xp = namespace(g)
    total = _cumulative(g)
    since = xp.permute_dims(past, (0, 2, 1))
    new = total[:, :, :, None] - total[:, :, None, :]
    to_past = total[:, :, :, None] + since[:, :, None, :]
    end = total[:, :, -1:]
    update = Rewrite(
        xp.permute_dims(since + end, (0, 2, 1)), xp.permute_dims(end - total, (0, 2, 1))
    )
    return xp.concat([to_past, new], axis=-1), update


def _cumulative(g: Array) -> Array:
    """G (b, h, s) from g (b, s, h)."""
    xp = namespace(g)
    return xp.permute_dims(xp.cumulative_sum(g, axis=1), (0, 2, 1))
