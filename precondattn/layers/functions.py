"""The array functions with which recipes are written.

The first axis of a weight is summed over: `linear(x, w)` of x (b, t, x) and w (x, h, d) is
(b, t, h, d). Norms, exponentials and rotations in half precision are computed in float32.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from precondattn.arrays import (
    Array,
    DType,
    Namespace,
    cast,
    is_compiling,
    library_of,
    namespace,
    placement,
    zero_where_not,
)
from precondattn.frameworks import of
from precondattn.given import Given
from precondattn.spec.scaled_dims import softplus as softplus_of_arrays

if TYPE_CHECKING:
    from precondattn.layers.maps import Map


class LinearMap:
    """A linear map with a bias that a module computes; `linear` calls it.

    The module is that of the framework, or one that a tool has put in its place: quantized, or with
    adapters.
    """

    def __init__(self, of_map: Map, module: Given) -> None:
        self.map, self.module = of_map, module

    def __call__(self, x: Array) -> Array:
        return self.map.split(self.module(self.map.joined(x)))


def linear(x: Array, weight: Array | LinearMap, axes: int = 1, bias: Array | None = None) -> Array:
    """The product Σ x w + b, summed over the last `axes` axes of x, the first ones of w."""
    if isinstance(weight, LinearMap):
        return weight(x)
    # Not tensordot: under autocast it refuses different dtypes, which a matrix product casts.
    if library_of(x) == "jax" and sys.modules["jax"].typeof(x).sharding.mesh.explicit_axes:
        y = _linear_of_shards(x, weight, axes)
    else:
        xp, terms = namespace(x), math.prod(weight.shape[:axes])
        y = xp.reshape(x, (*x.shape[:-axes], terms)) @ xp.reshape(weight, (terms, -1))
        if weight.ndim != axes + 1:
            y = xp.reshape(y, (*y.shape[:-1], *weight.shape[axes:]))
    return y if bias is None else y + bias


def _linear_of_shards(x: Array, weight: Array, axes: int) -> Array:
    """The product in JAX's explicit mode, which requires the sharding of a sum over shards.

    Each axis of the result is sharded like the same axis of x or of the weight.
    """
    jax = sys.modules["jax"]
    of_x, of_weight = (jax.typeof(array).sharding.spec for array in (x, weight))
    spec = jax.sharding.PartitionSpec(*of_x[: x.ndim - axes], *of_weight[axes:])
    summed = (range(x.ndim - axes, x.ndim), range(axes))
    return jax.lax.dot_general(x, weight, (summed, ((), ())), out_sharding=spec)


def upcast(x: Array) -> Array:
    """A half-precision array in float32; any other array unchanged."""
    # The item size decides, because PyTorch's compiler can not follow a table of names.
    return cast(x, namespace(x).float32) if x.dtype.itemsize < 4 else x


def scores(x: Array, p: Mapping[str, Array]) -> Array:
    """W x + b, or B A x + b of a map of low rank, in float32."""
    if "down" in p:
        x, weight = linear(x, p["down"]), p["up"]
    else:
        weight = p["weight"]
    return upcast(linear(x, weight, bias=p.get("bias")))


def sigmoid(x: Array) -> Array:
    native, xp = _native(x), namespace(x)
    if native is not None:
        return native.sigmoid(x)
    small = xp.exp(-xp.abs(x))  # This never overflows.
    return xp.where(x < 0, small, 1.0) / (1.0 + small)


def silu(x: Array) -> Array:
    """The activation x σ(x)."""
    native = _native(x)
    return x * sigmoid(x) if native is None else native.silu(x)


def gelu(x: Array) -> Array:
    """The activation x Φ(x), with Φ the normal distribution function; PyTorch and JAX only."""
    native = _native(x)
    exact = {} if library_of(x) == "torch" else {"approximate": False}
    return native.gelu(x, **exact)


def softplus(x: Array) -> Array:
    """The function log(1 + eˣ)."""
    native = _native(x)
    return softplus_of_arrays(x) if native is None else native.softplus(x)


def log_sigmoid(x: Array) -> Array:
    """The function log σ(x)."""
    return -softplus(-x)


def log_decay(log_rate: Array, step: Array) -> Array:
    """The log-decay −e^a Δ, of a = `log_rate`.

    Where it is so low that nothing is kept, its gradient is 0; with an infinite e^a, 0 · ∞ would be
    NaN. So e^a has two finite factors, the second of them 1 up to a = 80. Up to a = 120 no Δ above
    0 is so small that more than 120 would differ.
    """
    xp, a = namespace(step), upcast(log_rate)
    factor = xp.clip(a, max=80.0)
    return -xp.exp(factor) * (step * xp.exp(xp.clip(a, max=120.0) - factor))


def _native(x: Array) -> Namespace:
    """The library's module with these functions; None if the library has none."""
    library = library_of(x)
    if library == "torch":
        return sys.modules["torch"].nn.functional
    return sys.modules["jax"].nn if library == "jax" and "jax.nn" in sys.modules else None


def unit_rows(x: Array, eps: float) -> Array:
    """Rows scaled to length 1: x / √(Σ x² + eps)."""
    xp, wide = namespace(x), upcast(x)
    squares = xp.sum(wide * wide, axis=-1, keepdims=True)
    return cast(wide / xp.sqrt(squares + eps), x.dtype)


def rms_norm(x: Array, eps: float, gain: Array, axes: int = 1) -> Array:
    """The RMS norm γ x / √(mean x² + eps), with the mean over the last `axes` axes."""
    xp, wide = namespace(x), upcast(x)
    # PyTorch's function on a CPU writes to a result, which selective checkpointing does not allow.
    if library_of(x) == "torch" and gain.ndim == axes and (is_compiling() or of(x).only_computes()):
        normed = _native(x).rms_norm(wide, wide.shape[-axes:], cast(gain, wide.dtype), eps)
        return cast(normed, x.dtype)
    over = tuple(range(x.ndim - axes, x.ndim))
    mean = xp.mean(wide * wide, axis=over, keepdims=True)
    return cast(gain * (wide / xp.sqrt(mean + eps)), x.dtype)


def layer_norm(x: Array, eps: float) -> Array:
    """The layer norm (x − mean x) / √(variance + eps) of rows in float32 or float64."""
    xp = namespace(x)
    centred = x - xp.mean(x, axis=-1, keepdims=True)
    variance = xp.mean(centred * centred, axis=-1, keepdims=True)
    return centred / xp.sqrt(variance + eps)


def rotation(positions: Array, width: int, theta: float, dtype: DType) -> tuple[Array, Array]:
    """The cosines and sines (b, t, 1, width/2) of the angles position · θ^{−2i/width}."""
    xp = namespace(positions)
    index = xp.arange(width // 2, dtype=dtype, **placement(positions))
    angle = positions[:, :, None, None] * theta ** (index * (-2 / width))
    return xp.cos(angle), xp.sin(angle)


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """RoPE: x (b, t, h, d) with the pairs (x_i, x_{i + r/2}) of its first r channels rotated."""
    wide, half = upcast(x), cos.shape[-1]
    cos, sin = cast(cos, wide.dtype), cast(sin, wide.dtype)
    x1, x2 = wide[..., :half], wide[..., half : 2 * half]
    parts = [x1 * cos - x2 * sin, x2 * cos + x1 * sin]
    if 2 * half < x.shape[-1]:
        parts.append(wide[..., 2 * half :])
    return cast(namespace(x).concat(parts, axis=-1), x.dtype)


def causal_convolution(
    rows: Array, weight: Array, bias: Array | None, place: Array | None = None
) -> Array:
    """The depthwise convolution y_t = Σ_i w_i x_{t−c+1+i} + b of rows (b, c − 1 + t, …), w (c, …).

    If the `place` (b, t) of each token in its segment is given, rows before the segment count as 0.
    """
    size = weight.shape[0]
    t = rows.shape[1] - size + 1
    if t == 1 and place is None:
        y = namespace(rows).sum(rows * weight, axis=1, keepdims=True)
        return y if bias is None else y + bias

    def earlier(i: int) -> Array:
        """The rows x_{t−c+1+i}."""
        x = rows[:, i : i + t, ...]
        if place is None or i == size - 1:
            return x
        is_inside = namespace(place).reshape(place, (*place.shape, *(1,) * (x.ndim - 2)))
        return zero_where_not(is_inside >= size - 1 - i, x)

    y = earlier(0) * weight[0, ...]
    for i in range(1, size):
        y = y + earlier(i) * weight[i, ...]
    return y if bias is None else y + bias
