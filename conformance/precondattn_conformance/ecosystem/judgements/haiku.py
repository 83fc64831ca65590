"""The judgements of Haiku."""

from __future__ import annotations

from precondattn_conformance.ecosystem.judgement import DEFECT, Judgement

JUDGEMENTS: tuple[Judgement, ...] = (
    Judgement(
        "haiku/multi_head_attention",
        ("stability",),
        DEFECT,
        "Hidden logits are −1e30, so that a row whose visible logits are below it reads "
        "the future. Logits of this size are rare.",
        code="""\
import haiku as hk
import jax
from jax import numpy as jnp


def attend(q, k, v):
    one = hk.initializers.Constant(1)
    causal = jnp.tril(jnp.ones((1, 1, 2, 2), bool))
    return hk.MultiHeadAttention(1, 1, w_init=one, model_size=1)(q, k, v, causal)


q, k = jnp.full((1, 2, 1), 3e15), jnp.full((1, 2, 1), -3e15)
v = jnp.asarray([[[1.0], [5]]])
layer = hk.transform(attend)
out = layer.apply(layer.init(jax.random.key(0), q, k, v), None, q, k, v)
print("found:", out.ravel().tolist(), "expected:", [1.0, 3.0])
""",
    ),
)
