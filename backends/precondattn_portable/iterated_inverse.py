"""The iterated pseudo-inverse and its gradient (`precondattn/spec/iterated_inverse.py`).

With U = dP Xᵀ and V = Xᵀ dP, a step of the gradient takes eight products of m × m matrices:

    dX = 7 (U + V) − U Xᵀ − Xᵀ (U + V) − 15 dP
"""

from __future__ import annotations

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import identity_like, transpose
from precondattn.spec.iterated_inverse import largest_sum
from precondattn_portable.arithmetic import Arithmetic

Steps = list[tuple[Array, Array, Array]]
"""Z, X and P of each step Z' = ¼ Z P, which the gradient reads."""


def steps(ops: Arithmetic, a: Array, iterations: int, *, of_all: bool) -> tuple[Array, Steps]:
    """Z ≈ A⁺ of matrices (…, m, m), and the steps to it."""
    c, _ = largest_sum(a, of_all=of_all)
    z, one = transpose(a) / c, identity_like(a)
    done: Steps = []
    for _ in range(iterations):
        x = ops.product(a, z)
        p = ops.product(x, 7.0 * one - x)
        p = ops.product(x, 15.0 * one - p)
        p = 13.0 * one - p
        done.append((z, x, p))
        z = 0.25 * ops.product(z, p)
    return z, done


def steps_vjp(ops: Arithmetic, a: Array, done: Steps, d_z: Array, *, of_all: bool) -> Array:
    """The gradient of A, from that of Z."""
    xp = namespace(a)
    d_a = ops.zeros(a.shape, a)
    for z, x, p in reversed(done):
        d_z = 0.25 * d_z
        d_p, x_t = ops.product(transpose(z), d_z), transpose(x)
        u = ops.product(d_p, x_t)
        both = u + ops.product(x_t, d_p)
        d_x = ops.add_product(7.0 * both - 15.0 * d_p, u, x_t, -1.0)
        d_x = ops.add_product(d_x, x_t, both, -1.0)
        d_a = ops.add_product(d_a, d_x, transpose(z))
        d_z = ops.add_product(ops.product(d_z, transpose(p)), transpose(a), d_x)
    c, share = largest_sum(a, of_all=of_all)
    axes = tuple(range(a.ndim)) if of_all else (-2, -1)
    d_c = -xp.sum(d_z * done[0][0], axis=axes, keepdims=True) / c
    return d_a + transpose(d_z) / c + d_c * share
