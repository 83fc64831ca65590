"""Equinox: attention of one head of one sequence, mapped over heads and sequences."""

from __future__ import annotations

from precondattn.arrays import Array
from precondattn_conformance.peers.project import Project

EQUINOX = Project(
    "equinox", "Equinox", "https://github.com/patrick-kidger/equinox", package="equinox"
)
ALL = (EQUINOX,)


@EQUINOX.peer("softmax", library="jax", layout="bhtd", heads="equal")
def dot_product_attention(q: Array, k: Array, v: Array, visible: Array) -> Array:
    import jax
    import jax.numpy as jnp

    attend = EQUINOX.imported("equinox.nn._attention").dot_product_attention
    mask = jnp.broadcast_to(visible[:, 0, ...], (q.shape[0], q.shape[2], k.shape[2]))
    of_sequence = jax.vmap(attend, in_axes=(0, 0, 0, None))
    return jax.vmap(of_sequence)(q, k, v, mask)
