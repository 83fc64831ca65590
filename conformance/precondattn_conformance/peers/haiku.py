"""Haiku: `MultiHeadAttention`, with its projections bypassed by a method interceptor."""

from __future__ import annotations

from precondattn.arrays import Array
from precondattn_conformance.peers.arrays import Foreign
from precondattn_conformance.peers.project import Project

HAIKU = Project("haiku", "Haiku", "https://github.com/google-deepmind/dm-haiku", package="dm-haiku")
ALL = (HAIKU,)


@HAIKU.peer("softmax", library="jax", heads="equal")
def multi_head_attention(q: Array, k: Array, v: Array, visible: Array) -> Array:
    haiku = HAIKU.imported("haiku")
    (b, t, h, d), e = q.shape, v.shape[-1]

    def unprojected(method: Foreign, args: Foreign, kwargs: Foreign, context: Foreign) -> Foreign:
        is_projected = isinstance(context.module, haiku.Linear)
        is_called = context.method_name == "__call__"
        return args[0] if is_projected and is_called else method(*args, **kwargs)

    def attend(*arrays: Array) -> Array:
        any_weights = haiku.initializers.Constant(0)
        layer = haiku.MultiHeadAttention(h, d, w_init=any_weights, value_size=e)
        with haiku.intercept_methods(unprojected):
            return layer(*(x.reshape(*x.shape[:2], -1) for x in arrays), visible)

    out = haiku.transform(attend).apply({}, None, q, k, v)
    return out.reshape(b, t, h, e)
