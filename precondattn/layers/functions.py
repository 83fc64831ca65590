"""Functions of arrays that recipes are written with.

Weights have the axis that is summed first: `linear(x, w)` of x (b, t, x) and w (x, h, d) is
(b, t, h, d). Norms, exponentials and rotations of half precision are computed in float32.
"""

from __future__ import annotations

import math
import sys

from precondattn.arrays import (
    Array,
    DType,
    Namespace,
    cast,
    library_of,
    namespace,
    placement,
    zero_where_not,
)


class LinearMap:
    """A linear map that a module of a layer computes, with its bias: what `linear` then calls."""

    def __call__(self, x: Array) -> Array:
        raise NotImplementedError


def linear(x: Array, weight: Array | LinearMap, axes: int = 1, bias: Array | None = None) -> Array:
    """Σ x w + b over the last `axes` axes of x, which are the first of the weight."""
    if isinstance(weight, LinearMap):
        return weight(x)
    y = _product(x, weight, axes)
    return y if bias is None else y + bias


def _product(x: Array, weight: Array, axes: int) -> Array:
    # Not tensordot: under autocast it refuses x and w of two dtypes, which a product casts.
    if library_of(x) == "jax" and sys.modules["jax"].typeof(x).sharding.mesh.explicit_axes:
        return _linear_of_shards(x, weight, axes)
    xp = namespace(x)
    terms = math.prod(weight.shape[:axes])
    y = xp.reshape(x, (*x.shape[:-axes], terms)) @ xp.reshape(weight, (terms, -1))
    return y if weight.ndim == axes + 1 else xp.reshape(y, (*y.shape[:-1], *weight.shape[axes:]))


def _linear_of_shards(x: Array, weight: Array, axes: int) -> Array:
    """The product in JAX's explicit mode, where the sharding of a sum over shards has to be given.

    Each axis of the result is sharded as it was in x or in the weight.
    """
    jax = sys.modules["jax"]
    own, of_weight = (jax.typeof(array).sharding.spec for array in (x, weight))
    spec = jax.sharding.PartitionSpec(*own[: x.ndim - axes], *of_weight[axes:])
    summed = (range(x.ndim - axes, x.ndim), range(axes))
    return jax.lax.dot_general(x, weight, (summed, ((), ())), out_sharding=spec)


def upcast(x: Array) -> Array:
    """A half-precision array in float32; any other array unchanged."""
    # By its size: PyTorch's compiler can not follow a table of names.
    return cast(x, namespace(x).float32) if x.dtype.itemsize < 4 else x


def sigmoid(x: Array) -> Array:
    native = _native(x)
    return (
        namespace(x).reciprocal(1 + namespace(x).exp(-x)) if native is None else native.sigmoid(x)
    )


def silu(x: Array) -> Array:
    """x σ(x)."""
    native = _native(x)
    return x * sigmoid(x) if native is None else native.silu(x)


def gelu(x: Array) -> Array:
    """x Φ(x), with Φ the normal distribution function; of PyTorch and JAX only."""
    native = _native(x)
    exact = {} if library_of(x) == "torch" else {"approximate": False}
    return native.gelu(x, **exact)


def softplus(x: Array) -> Array:
    """log(1 + eˣ)."""
    native, xp = _native(x), namespace(x)
    if native is not None:
        return native.softplus(x)
    return xp.maximum(x, 0 * x) + xp.log1p(xp.exp(-xp.abs(x)))


def log_sigmoid(x: Array) -> Array:
    """log σ(x)."""
    return -softplus(-x)


def _native(x: Array) -> Namespace:
    """The module in which the library has these functions; None for a library without them."""
    library = library_of(x)
    if library == "torch":
        return sys.modules["torch"].nn.functional
    return sys.modules["jax"].nn if library == "jax" and "jax.nn" in sys.modules else None


def unit_rows(x: Array, eps: float) -> Array:
    """x / √(Σ x² + eps), row by row."""
    xp, wide = namespace(x), upcast(x)
    squares = xp.sum(wide * wide, axis=-1, keepdims=True)
    return cast(wide / xp.sqrt(squares + eps), x.dtype)


def rms_norm(x: Array, eps: float, gain: Array, axes: int = 1) -> Array:
    """γ x / √(mean x² + eps), where the mean is over the last `axes` axes."""
    xp, wide = namespace(x), upcast(x)
    if library_of(x) == "torch" and gain.ndim == axes:
        normed = _native(x).rms_norm(wide, wide.shape[-axes:], cast(gain, wide.dtype), eps)
        return cast(normed, x.dtype)
    over = tuple(range(x.ndim - axes, x.ndim))
    mean = xp.mean(wide * wide, axis=over, keepdims=True)
    return cast(gain * (wide / xp.sqrt(mean + eps)), x.dtype)


def layer_norm(x: Array, eps: float) -> Array:
    """(x − mean x) / √(variance + eps), row by row, of single or double precision."""
    xp = namespace(x)
    centred = x - xp.mean(x, axis=-1, keepdims=True)
    variance = xp.mean(centred * centred, axis=-1, keepdims=True)
    return centred / xp.sqrt(variance + eps)


def rotation(positions: Array, width: int, theta: float, dtype: DType) -> tuple[Array, Array]:
    """cos and sin of the angles position · θ^{−2i/width}, (b, t, 1, width/2), of float `dtype`."""
    xp = namespace(positions)
    index = xp.arange(width // 2, dtype=dtype, **placement(positions))
    angle = positions[:, :, None, None] * theta ** (index * (-2 / width))
    return xp.cos(angle), xp.sin(angle)


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """RoPE: the pairs (x_i, x_{i + r/2}) of the first r channels of x (b, t, h, d) are rotated."""
    wide, half = upcast(x), cos.shape[-1]
    cos, sin = cast(cos, wide.dtype), cast(sin, wide.dtype)
    first, second = wide[..., :half], wide[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        parts.append(wide[..., 2 * half :])
    return cast(namespace(x).concat(parts, axis=-1), x.dtype)


def causal_convolution(
    rows: Array, weight: Array, bias: Array | None, place: Array | None = None
) -> Array:
    """y_t = Σ_i w_i x_{t−c+1+i} + b, channel by channel, of rows (b, c − 1 + t, …), w (c, …).

    With the `place` (b, t) of each token in its segment, rows before the segment are 0.
    """
    size = weight.shape[0]
    t = rows.shape[1] - size + 1
    if t == 1 and place is None:
        y = namespace(rows).sum(rows * weight, axis=1, keepdims=True)
        return y if bias is None else y + bias

    def earlier(i: int) -> Array:
        """x_{t−c+1+i}"""
        x = rows[:, i : i + t, ...]
        if place is None or i == size - 1:
            return x
        is_inside = namespace(place).reshape(place, (*place.shape, *(1,) * (x.ndim - 2)))
        return zero_where_not(is_inside >= size - 1 - i, x)

    y = earlier(0) * weight[0, ...]
    for i in range(1, size):
        y = y + earlier(i) * weight[i, ...]
    return y if bias is None else y + bias
