"""Products, exponentials and the few other operations that dominate the run time.

The array-API standard has no `out=` and allocates every result. Libraries with `out=` avoid the
allocation, so the algorithms pass an array to which a result may be written: "in x" below means "in
x if the library supports it". They always use the returned array, which may or may not be x.

Arrays have heads before time, (b, n, rows, columns); the last two axes are matrices.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import array_api_compat.numpy
import numpy as np

from precondattn.arrays import Array, Arrays, Index, Namespace, arange_like, namespace, placement
from precondattn.spec.array_functions import row_sum, swap_time_and_heads, transpose
from precondattn.spec.l2_norm import l2_norm, length
from precondattn.spec.rms_norm import rms
from precondattn_portable.sizes import ON_CPU, BlockSizes

NP: Namespace = np
"""NumPy without its types, which are narrower than those of the operations."""


class Scratch:
    """Workspace for temporary results that reuses memory. This base class has no memory.

    Allocating memory costs about as much as filling it.
    """

    def shaped(self, shape: tuple[int, ...], name: str = "") -> Array | None:
        """Workspace of this shape, which overwrites the previous one of the same name."""
        return None


class FlatScratch(Scratch):
    """One flat buffer per name, whose first elements are reshaped to each requested shape."""

    def __init__(self, ops: Arithmetic, size: int, like: Array) -> None:
        self.ops, self.like = ops, like
        self.pieces = {"": ops.empty((size,), like)}

    def shaped(self, shape: tuple[int, ...], name: str = "") -> Array:
        size = math.prod(shape)
        if name not in self.pieces or self.pieces[name].shape[0] < size:
            self.pieces[name] = self.ops.empty((size,), self.like)
        return self.ops.reshape(self.pieces[name][:size], shape)


class Arithmetic:
    """Operations of the array-API standard alone: nothing is written in place."""

    writes = False
    """Whether `array[index] = update` is allowed."""

    def __init__(self, sizes: BlockSizes = ON_CPU) -> None:
        self.sizes = sizes

    add = staticmethod(operator.add)
    """x + y, in x; y broadcasts to x, as in the next three operations."""
    subtract = staticmethod(operator.sub)
    multiply = staticmethod(operator.mul)
    divide = staticmethod(operator.truediv)

    namespace = staticmethod(namespace)
    transposed: Callable[[Array], Array] = staticmethod(transpose)
    swapped: Callable[[Array], Array] = staticmethod(swap_time_and_heads)
    """(b, t, h, …) as (b, h, t, …), or the reverse."""

    def arange(self, count: int, like: Array) -> Array:
        """0, 1, … count − 1 as int32, on like's device."""
        return arange_like(count, like)

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        return namespace(x).reshape(x, shape)

    def rms(self, x: Array, eps: float) -> Array:
        """√(mean x² + eps) of every row; 1 where it is 0."""
        return rms(x, eps)

    def empty(self, shape: tuple[int, ...], like: Array) -> Array:
        """An uninitialized array for results, with like's dtype and device."""
        return namespace(like).empty(shape, dtype=like.dtype, **placement(like))

    def zeros(self, shape: tuple[int, ...], like: Array) -> Array:
        return namespace(like).zeros(shape, dtype=like.dtype, **placement(like))

    def time_first(self, shape: tuple[int, ...], like: Array, axis: int) -> Array:
        """An uninitialized array (b, …, t, …), as `empty` with the axis of t after b in memory."""
        memory = (shape[0], shape[axis], *shape[1:axis], *shape[axis + 1 :])
        order = (0, *range(2, axis + 1), 1, *range(axis + 1, len(shape)))
        return self.permuted(self.empty(memory, like), order)

    def permuted(self, x: Array, order: tuple[int, ...]) -> Array:
        return namespace(x).permute_dims(x, order)

    def scratch(self, size: int, like: Array) -> Scratch:
        """Workspace for temporary results; those without a name have at most `size` elements."""
        return Scratch()

    def heads_first(self, x: Array) -> Array:
        """(b, t, h, …) to (b, h, t, …), each head contiguous in memory."""
        return namespace(x).permute_dims(x, (0, 2, 1, *range(3, x.ndim)))

    def product(self, a: Array, b: Array, out: Array | None = None) -> Array:
        """a b, in `out`."""
        return a @ b

    def add_product(self, total: Array, a: Array, b: Array, factor: float = 1.0) -> Array:
        """total + factor a b, in `total`."""
        return total + (a @ b) * factor

    def add_product_at(
        self, total: Array, where: Index, a: Array, b: Array, factor: float = 1.0
    ) -> None:
        """total[where] += factor a b; `total` belongs to the algorithm and is modified."""
        view = total[where]
        result = self.add_product(view, a, b, factor)
        if result is not view:
            total[where] = result

    def exp(self, x: Array) -> Array:
        """eˣ, in x."""
        return namespace(x).exp(x)

    def log(self, x: Array) -> Array:
        """log x, in x."""
        return namespace(x).log(x)

    def tanh(self, x: Array) -> Array:
        """tanh x, in x."""
        return namespace(x).tanh(x)

    def softsign_power(self, base: float, x: Array, workspace: Array) -> Array:
        """base^{x / (1 + |x|)}, in x; it may overwrite `workspace`."""
        xp = namespace(x)
        return xp.exp(math.log(base) * (x / (1 + xp.abs(x))))

    def add_multiple(self, total: Array, x: Array, y: Array) -> Array:
        """total + x ∘ y, in `total`; x and y broadcast to it."""
        return total + x * y

    def plus_product(self, total: Array, x: Array, y: Array) -> Array:
        """total + x ∘ y in a new array; x and y broadcast to `total`."""
        return total + x * y

    def multiplied(self, x: Array, y: Array, out: Array | None = None) -> Array:
        """x ∘ y, in `out`."""
        return x * y

    def unit_rows(self, x: Array, eps: float) -> Array:
        """x / √(‖x‖² + eps) of every row, in a new array."""
        return l2_norm(x, eps)

    def channel_lengths(self, x: Array, eps: float) -> Array:
        """√(Σ_t x_t² + eps) of every channel of x (b, h, t, d), (b, h, 1, d); 1 where it is 0."""
        return transpose(length(transpose(x), eps))

    def summed(self, count: Array, term: Callable[[int], Arrays]) -> Arrays:
        """term(0) + … + term(count − 1), for an integer array () above 0."""
        total = term(0)
        for i in range(1, int(count)):
            more = term(i)
            total = {name: self.add(array, more[name]) for name, array in total.items()}
        return total

    def softmax(self, x: Array) -> Array:
        """eˣ / Σ eˣ along the last axis, in x, of rows with at least one finite entry."""
        xp = namespace(x)
        x = self.exp(self.subtract(x, xp.max(x, axis=-1, keepdims=True)))
        return self.divide(x, xp.sum(x, axis=-1, keepdims=True))

    def softmax_vjp(self, weights: Array, d_weights: Array) -> Array:
        """The gradient of the scores, A ∘ (dA − rowsum(dA ∘ A)), in dA."""
        mean = row_sum(d_weights * weights)
        return self.multiply(self.subtract(d_weights, mean), weights)

    def keep(self, x: Array, where: Array, otherwise: float) -> Array:
        """x where `where` is true, else `otherwise`; in x."""
        return namespace(x).where(where, x, otherwise)

    def replaced(self, x: Array, value: float, by: float) -> Array:
        """x, with another number in place of `value`; it may be in x."""
        return self.namespace(x).where(x == value, by, x)

    def reciprocal(self, x: Array) -> Array:
        """1 / x"""
        return 1.0 / x

    def solve_unit_lower(
        self, strict: Array, right: Array, *, transposed: bool = False
    ) -> Array | None:
        """(I + strict)⁻¹ right by the library's triangular solver; None if the library has none.

        With the transposed matrix it is (I + strictᵀ)⁻¹ right.
        """
        return None

    def accumulate(self, x: Array, axis: int) -> Array:
        """The sums of all elements up to each one, in x."""
        return namespace(x).cumulative_sum(x, axis=axis)

    def lower(self, x: Array, k: int = 0) -> Array:
        """The lower triangles of matrices, 0 above diagonal k; in x."""
        return namespace(x).tril(x, k=k)


class InPlace(Arithmetic):
    """Operations of NumPy and CuPy, whose functions support `out=`."""

    writes = True

    add = staticmethod(operator.iadd)
    subtract = staticmethod(operator.isub)
    multiply = staticmethod(operator.imul)
    divide = staticmethod(operator.itruediv)

    def scratch(self, size: int, like: Array) -> Scratch:
        return FlatScratch(self, size, like)

    def heads_first(self, x: Array) -> Array:
        return namespace(x).ascontiguousarray(super().heads_first(x))

    def product(self, a: Array, b: Array, out: Array | None = None) -> Array:
        return namespace(a).matmul(a, b, out=out)

    def add_product(self, total: Array, a: Array, b: Array, factor: float = 1.0) -> Array:
        step = namespace(a).matmul(a, b)
        if factor == -1.0:
            return self.subtract(total, step)
        if factor != 1.0:
            step *= factor
        return self.add(total, step)

    def exp(self, x: Array) -> Array:
        return namespace(x).exp(x, out=x)

    def log(self, x: Array) -> Array:
        return namespace(x).log(x, out=x)

    def tanh(self, x: Array) -> Array:
        return namespace(x).tanh(x, out=x)

    def softsign_power(self, base: float, x: Array, workspace: Array) -> Array:
        workspace = namespace(x).abs(x, out=workspace)
        workspace += 1.0
        x /= workspace
        x *= math.log(base)
        return self.exp(x)

    def add_multiple(self, total: Array, x: Array, y: Array) -> Array:
        return self.add(total, x * y)

    def plus_product(self, total: Array, x: Array, y: Array) -> Array:
        return self.add(x * y, total)

    def multiplied(self, x: Array, y: Array, out: Array | None = None) -> Array:
        return namespace(x).multiply(x, y, out=out)

    def accumulate(self, x: Array, axis: int) -> Array:
        return namespace(x).cumsum(x, axis=axis, out=x)

    def keep(self, x: Array, where: Array, otherwise: float) -> Array:
        namespace(x).copyto(x, otherwise, where=~where)
        return x


class OfNumPy(InPlace):
    """Operations of NumPy, without the look-up of an array's library."""

    def namespace(self, *arrays: Array) -> Namespace:
        return array_api_compat.numpy

    product = staticmethod(NP.matmul)
    transposed = staticmethod(operator.attrgetter("mT"))
    swapped = staticmethod(operator.methodcaller("swapaxes", 1, 2))
    reshape = staticmethod(NP.reshape)
    permuted = staticmethod(NP.transpose)
    reciprocal = staticmethod(NP.reciprocal)
    lower = staticmethod(NP.tril)

    def arange(self, count: int, like: Array) -> Array:
        return np.arange(count, dtype=np.int32)

    def empty(self, shape: tuple[int, ...], like: Array) -> Array:
        return np.empty(shape, like.dtype)

    def zeros(self, shape: tuple[int, ...], like: Array) -> Array:
        return np.zeros(shape, like.dtype)

    def heads_first(self, x: Array) -> Array:
        return np.ascontiguousarray(x.swapaxes(1, 2))

    def rms(self, x: Array, eps: float) -> Array:
        mean_square = np.sum(x * x, axis=-1, keepdims=True) / x.shape[-1] + eps
        if eps >= 1e-30:  # As in `spec/rms_norm.py`.
            return np.sqrt(mean_square)
        return np.sqrt(np.where(mean_square > 0, mean_square, 1.0))

    def exp(self, x: Array) -> Array:
        return np.exp(x, out=x)

    def replaced(self, x: Array, value: float, by: float) -> Array:
        return np.where(x == value, by, x)

    def keep(self, x: Array, where: Array, otherwise: float) -> Array:
        np.copyto(x, otherwise, where=~where)
        return x


STANDARD = Arithmetic()
IN_PLACE = InPlace()
BY_LIBRARY: dict[str, type[Arithmetic]] = {"numpy": OfNumPy, "cupy": InPlace}


def product_at(ops: Arithmetic, array: Array, where: Index, a: Array, b: Array) -> Array:
    """array[where] = a b; returns the new part."""
    view = array[where]
    return stored(array, where, view, ops.product(a, b, view))


def changed_at(
    operation: Callable[..., Array], array: Array, where: Index, *given: Array | float
) -> Array:
    """array[where] = operation(array[where], …); returns the new part."""
    view = array[where]
    return stored(array, where, view, operation(view, *given))


def stored(array: Array, where: Index, view: Array, result: Array) -> Array:
    """array[where] = result, unless `result` is already in `view`, which is array[where]."""
    if result is not view:
        array[where] = result
    return result
