"""Pieces of LUCID's matrix, and where the scratch of a solve stands.

    Φ_ij = e^{s ⟨k̂_i, k̂_j⟩ − s d} ≤ 1,    0 where i and j belong to different segments

Scratch arrays are padded: (m, T, w), with m = b n the heads of all sequences, T the tokens filled
up to whole super-blocks and w to whole tiles. Tokens that count for nothing, those that fill up
among them, have k̂ = 0, v = 0 and β = 0, so that nothing needs a mask any more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from precondattn_pallas.precision import Products


class Phi(NamedTuple):
    """How Φ comes of keys."""

    scale: float
    """s log₂ e"""
    shift: float
    """s d log₂ e"""
    products: Products

    def tile(self, i_keys: Any, j_keys: Any, i_segments: Any, j_segments: Any) -> Any:
        """Φ of two tiles of keys (I, d) and (J, d); segments (I) and (J), or None."""
        return self.weights(self.products.dot(i_keys, j_keys, right=True), i_segments, j_segments)

    def weights(self, scores: Any, i_segments: Any, j_segments: Any) -> Any:
        """Φ from ⟨k̂_i, k̂_j⟩."""
        found = jnp.exp2(scores * self.scale - self.shift)
        if i_segments is None:
            return found
        return jnp.where(i_segments[:, None] == j_segments[None, :], found, 0.0)


def of_tile(references: Any, name: str, *index: Any) -> Any:
    """A part of an optional input, or None."""
    return references[name][index] if name in references else None
