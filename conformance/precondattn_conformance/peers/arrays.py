"""Conversions shared by adapters: heads first, whole chunks, equal widths; all differentiable."""

from __future__ import annotations

from typing import Any

from precondattn.arrays import Array, namespace, placement

Foreign = Any
"""A function, module, object or argument of a project, whose type belongs to the project."""

HALF32 = ("float32", "bfloat16", "float16")
"""The dtypes of functions that compute in float32."""


def heads_first(*arrays: Array) -> list[Array]:
    """Arrays (b, t, h, …) as (b, h, t, …), or back."""
    return [namespace(x).moveaxis(x, 1, 2) for x in arrays]


def widened(x: Array, width: int) -> Array:
    """An array (…, d) padded with zeros to (…, width)."""
    if x.shape[-1] == width:
        return x
    xp = namespace(x)
    zeros = xp.zeros((*x.shape[:-1], width - x.shape[-1]), dtype=x.dtype, **placement(x))
    return xp.concat([x, zeros], axis=-1)


def equally_wide(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Queries, keys (…, d) and values (…, e), padded with zeros to the larger width.

    This changes the default scale, and only the first e channels of the output count.
    """
    width = max(q.shape[-1], v.shape[-1])
    return widened(q, width), widened(k, width), widened(v, width)


def scale_of(q: Array, scale: float | None) -> float:
    """The scale of logits; by default d^{-1/2} for queries (…, d)."""
    return float(q.shape[-1] ** -0.5) if scale is None else scale


def whole_mask(visible: Array, q: Array) -> Array:
    """A mask (b or 1, 1, t, s), as (b, 1, t, s)."""
    xp = namespace(visible)
    return xp.broadcast_to(visible, (q.shape[0], *visible.shape[1:]))


def mask_with_bias(visible: Array, bias: Array | None, q: Array) -> Array:
    """A bias (b, h, t, s) with −∞ where a key is not visible; without a bias, the mask."""
    if bias is None:
        return visible
    xp = namespace(q)
    return xp.astype(xp.where(visible, bias, -float("inf")), q.dtype)


def equally_wide_by_default(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """`equally_wide` for a function whose scale is always width^{-1/2}."""
    wide_q, wide_k, wide_v = equally_wide(q, k, v)
    return wide_q * (wide_q.shape[-1] / q.shape[-1]) ** 0.5, wide_k, wide_v


def only_self_attention(q: Array, k: Array, tokens: int = 1) -> None:
    """Decline a call with fewer queries than keys; `tokens` is their token axis.

    Raises
    ------
    ValueError
        if there are not as many queries as keys.
    """
    if q.shape[tokens] != k.shape[tokens]:
        raise ValueError("it takes as many queries as keys")


def in_one_dtype(*arrays: Array) -> list[Array]:
    """Arrays converted to the widest of their dtypes, for functions that require one dtype."""
    xp = namespace(arrays[0])
    dtype = xp.result_type(*arrays)
    return [xp.astype(x, dtype) for x in arrays]


def forget_gate(g: Array) -> Array:
    """The gate before the sigmoid whose sigmoid is the decay e^g.

    A decay of 1 would need an infinite gate, so it is replaced by a decay that differs in the last
    digit.
    """
    xp = namespace(g)
    least = float(xp.finfo(g.dtype).eps)
    below = g - xp.where(g == 0, xp.full_like(g, least), xp.zeros_like(g))
    return below - xp.log(-xp.expm1(below))
