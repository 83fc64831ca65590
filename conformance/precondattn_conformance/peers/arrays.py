"""What adapters share: heads first, whole chunks, equal widths. All of it is differentiable."""

from __future__ import annotations

from typing import Any

from precondattn.arrays import Array, namespace, placement

Foreign = Any
"""A function, module or object of a project, and its arguments: their types are the project's."""

HALF32 = ("float32", "bfloat16", "float16")
"""The dtypes of functions that compute in float32."""


def heads_first(*arrays: Array) -> list[Array]:
    """Arrays (b, t, h, …) as (b, h, t, …), or back."""
    return [namespace(x).moveaxis(x, 1, 2) for x in arrays]


def widened(x: Array, width: int) -> Array:
    """An array (…, d) with zeros behind, as (…, width)."""
    if x.shape[-1] == width:
        return x
    xp = namespace(x)
    zeros = xp.zeros((*x.shape[:-1], width - x.shape[-1]), dtype=x.dtype, **placement(x))
    return xp.concat([x, zeros], axis=-1)


def equally_wide(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Queries, keys (…, d) and values (…, e) of the larger width, with zeros behind.

    The default scale is then another, and of the output the first e channels count.
    """
    width = max(q.shape[-1], v.shape[-1])
    return widened(q, width), widened(k, width), widened(v, width)


def scale_of(q: Array, scale: float | None) -> float:
    """The scale of logits: d^{-1/2} of the queries (…, d) where none is given."""
    return float(q.shape[-1] ** -0.5) if scale is None else scale


def whole_mask(visible: Array, q: Array) -> Array:
    """A mask (b or 1, 1, t, s), as (b, 1, t, s)."""
    xp = namespace(visible)
    return xp.broadcast_to(visible, (q.shape[0], *visible.shape[1:]))


def mask_with_bias(visible: Array, bias: Array | None, q: Array) -> Array:
    """A mask with a bias (b, h, t, s): that, with −∞ where a key is not visible; else the mask."""
    if bias is None:
        return visible
    xp = namespace(q)
    return xp.astype(xp.where(visible, bias, -float("inf")), q.dtype)


def equally_wide_by_default(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """`equally_wide` for a function that has no parameter for its scale, width^{-1/2}."""
    wide_q, wide_k, wide_v = equally_wide(q, k, v)
    return wide_q * (wide_q.shape[-1] / q.shape[-1]) ** 0.5, wide_k, wide_v


def only_self_attention(q: Array, k: Array, tokens: int = 1) -> None:
    """Decline a call with fewer queries than keys; their tokens are on the given axis.

    Raises
    ------
    ValueError
        if there are not as many queries as keys.
    """
    if q.shape[tokens] != k.shape[tokens]:
        raise ValueError("it takes as many queries as keys")


def in_one_dtype(*arrays: Array) -> list[Array]:
    """Arrays in the widest of their dtypes, for functions that want the same of all."""
    xp = namespace(arrays[0])
    dtype = xp.result_type(*arrays)
    return [xp.astype(x, dtype) for x in arrays]


def forget_gate(g: Array) -> Array:
    """What a sigmoid turns into the decay e^g, for functions that take a gate before its sigmoid.

    A decay of 1 has no finite one, so it is replaced by one that differs in the last digit.
    """
    xp = namespace(g)
    least = float(xp.finfo(g.dtype).eps)
    below = g - xp.where(g == 0, xp.full_like(g, least), xp.zeros_like(g))
    return below - xp.log(-xp.expm1(below))
