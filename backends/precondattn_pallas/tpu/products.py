"""The products of tiles on a TPU, whose matrix unit multiplies bfloat16 and sums in float32.

A float32 factor is split into a sum of bfloat16 factors. For float32 inputs, `Precision.HIGHEST`
requests float32's accuracy, which takes six products. For bfloat16 inputs, a float32 factor is two
terms,

    a = a₁ + a₂ + O(2⁻¹⁶ a),    a b ≈ a₁ b₁ + a₁ b₂ + a₂ b₁,

two products where the other factor is in bfloat16, and three where it is not.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from precondattn.arrays import Array, DType


class TpuProducts(NamedTuple):
    """The products of tiles in a kernel; `precision.Products` is the counterpart for a GPU."""

    half: bool
    """Whether inputs are in bfloat16, so that 2⁻¹⁶ is accurate enough."""

    def dot(self, a: Array, b: Array, *, left: bool = False, right: bool = False) -> Array:
        """a b in float32, with the left or the right factor transposed."""
        dimensions = (((0 if left else 1,), (1 if right else 0,)), ((), ()))
        if not self.half and (a.dtype == jnp.float32 or b.dtype == jnp.float32):
            return _dot(a.astype(jnp.float32), b.astype(jnp.float32), dimensions)
        (a, *a_rest), (b, *b_rest) = _terms(a), _terms(b)
        result = _dot(a, b, dimensions)
        for rest in b_rest:
            result = result + _dot(a, rest, dimensions)
        for rest in a_rest:
            result = result + _dot(rest, b, dimensions)
        return result

    @property
    def exact(self) -> TpuProducts:
        """Products of factors that must not be rounded."""
        return self._replace(half=False)


def products(dtype: DType) -> TpuProducts:
    """The products of a kernel for inputs of this dtype."""
    return TpuProducts(jnp.dtype(dtype).itemsize == 2)


def _dot(a: Array, b: Array, dimensions: tuple[tuple[tuple[int, ...], ...], ...]) -> Array:
    # Given explicitly, since the user may change JAX's default for both.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def _terms(a: Array) -> tuple[Array, ...]:
    """Terms in bfloat16: the array itself, or two terms whose sum is nearly a float32 array."""
    if a.dtype == jnp.bfloat16:
        return (a,)
    # Bits are cleared, since a compiler may remove a conversion to bfloat16 and back.
    bits = jax.lax.bitcast_convert_type(a, jnp.int32) & jnp.int32(-65536)
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return high.astype(jnp.bfloat16), (a - high).astype(jnp.bfloat16)
