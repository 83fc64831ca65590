"""The precision of products: the dtype of factors, and how float32 factors are multiplied."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from precondattn.arrays import Array, DType
from precondattn.kernel_backend.precise import is_precise

LOG2_E = math.log2(math.e)
"""The factor for scores of which kernels compute exponentials to base 2."""

TF32_ALLOWED = ("default", "fastest", "bfloat16", "tensorfloat32", "TF32_TF32_F32")
"""Settings of `jax_default_matmul_precision` that are no more exact than tf32. Without a setting, a
float32 product has float32's accuracy, unlike JAX's own on a GPU."""


class Products(NamedTuple):
    """The products of tiles in a kernel, and their precision."""

    interpret: bool
    """Whether kernels are interpreted on a CPU, where 16-bit factors are multiplied in float32."""
    tf32: bool
    """Whether float32 factors may lose their last 13 bits; else each is split into three."""

    def dot(self, a: Array, b: Array, *, left: bool = False, right: bool = False) -> Array:
        """a b in float32, with the left or the right factor transposed.

        Factors of different dtypes are multiplied as float32.
        """
        dimensions = (((0 if left else 1,), (1 if right else 0,)), ((), ()))
        precision: lax.Precision | lax.DotAlgorithmPreset | None = None
        is_float32 = a.dtype != b.dtype or a.dtype == jnp.float32
        if self.interpret or is_float32:
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        if self.interpret:
            precision = lax.Precision.HIGHEST
            if self.tf32 and is_float32:
                a, b = _tf32(a), _tf32(b)
        elif is_float32:
            presets = lax.DotAlgorithmPreset
            precision = presets.TF32_TF32_F32 if self.tf32 else presets.TF32_TF32_F32_X3
        return lax.dot_general(
            a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
        )

    @property
    def exact(self) -> Products:
        """The products without tf32: factors lose no bits."""
        return self._replace(tf32=False)


def attention_products(dtype: DType, *, interpret: bool) -> tuple[Products, bool]:
    """The products of attention for values of this dtype, and whether its gradient rounds dS."""
    multiplied = products(dtype, interpret=interpret)
    if jnp.dtype(dtype).itemsize == 2:
        multiplied = multiplied._replace(tf32=True)  # P has at most 16 bits.
    return multiplied, dtype == jnp.bfloat16 and not is_precise()


def _tf32(x: Array) -> Array:
    """A float32 as tensor cores read it: with the first 10 bits of the fraction only."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFE000), jnp.float32)


def products(dtype: DType, *, interpret: bool) -> Products:
    """The products of a kernel for inputs of this dtype.

    tf32 has no fewer bits than either 16-bit dtype. Tensor cores do not round to them: where sums
    cancel, a precise kernel in float16 takes three products.
    """
    allowed = jax.config.jax_default_matmul_precision in TF32_ALLOWED
    enough = dtype == jnp.bfloat16 or (dtype == jnp.float16 and not is_precise())
    return Products(interpret, bool(allowed or enough))
