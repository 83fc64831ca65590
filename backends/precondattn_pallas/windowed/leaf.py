"""The leaf `Windowed`: supported calls, and their launches.

Residuals: λ (b, h, t), in units of log 2, and, if the output is rounded to half precision, the
output in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from precondattn.arrays import Array, Arrays, Residuals
from precondattn.backend import Request
from precondattn.frame import Frame
from precondattn.kernel_backend.limits import padded_width
from precondattn.kernel_backend.windows import declined_windows, grid_of
from precondattn.spec.windowed import Windowed
from precondattn_pallas.configurations import configuration
from precondattn_pallas.precision import attention_products
from precondattn_pallas.softmax.attention import SoftmaxKernels
from precondattn_pallas.softmax.widths import refuses_widths
from precondattn_pallas.windowed.forward import WindowedTiling, WindowMasks, attend
from precondattn_pallas.windowed.gradient import d_keys_and_values, d_queries, d_table
from precondattn_pallas.windowed.slots import SlotPlaces


class WindowedPlan(NamedTuple):
    """Sizes and options of a call, which are known before it runs."""

    forward: WindowedTiling
    query_gradient: WindowedTiling
    key_gradient: WindowedTiling
    table_gradient: WindowedTiling


def plan_of(leaf: Windowed, x: Mapping[str, Array], *, interpret: bool) -> WindowedPlan:
    q, k, v = (x[name] for name in "qkv")
    d, e, is_half = padded_width(q.shape[3]), padded_width(v.shape[3]), v.dtype.itemsize == 2
    places = SlotPlaces(*grid_of(leaf.windows, k.shape[1]), q.shape[1], k.shape[1])
    multiplied, rounds = attention_products(v.dtype, interpret=interpret)
    most = padded_width(places.size.slots)

    def tiling(kernel: str) -> WindowedTiling:
        tile = configuration(f"window_{kernel}", max(d, e), is_half)
        tile = tile._replace(rows=min(tile.rows, most), columns=min(tile.columns, most))
        return WindowedTiling(places, leaf.scale_for(q.shape[3]), multiplied, tile, d, e, rounds)

    return WindowedPlan(*(tiling(kernel) for kernel in WindowedPlan._fields))


@partial(jax.jit, static_argnums=0)
def _forward(plan: WindowedPlan, x: Arrays, masks: WindowMasks) -> tuple[Array, Residuals]:
    out, log_total = attend(plan.forward, x, masks)
    dtype = x["v"].dtype
    return out.astype(dtype), (log_total,) if dtype == jnp.float32 else (log_total, out)


@partial(jax.jit, static_argnums=0)
def _backward(
    plan: WindowedPlan,
    x: Arrays,
    masks: WindowMasks,
    out: Array,
    log_total: Array,
    d_o: Array,
) -> Arrays:
    d_sum = jnp.sum(d_o.astype(jnp.float32) * out.astype(jnp.float32), axis=3)
    x = {**x, "d_o": d_o, "log_total": log_total, "d_sum": jnp.swapaxes(d_sum, 1, 2)}
    scale = plan.forward.scale
    d_k, d_v = d_keys_and_values(plan.key_gradient, x, masks)
    gradients = {"q": scale * d_queries(plan.query_gradient, x, masks), "k": scale * d_k, "v": d_v}
    if "bias_table" in x:
        gradients["bias_table"] = d_table(plan.table_gradient, x, masks)
    return gradients


class WindowedKernels(SoftmaxKernels):
    """Softmax within windows, and its gradient, with the residuals of attention."""

    def refuses(self, leaf: Windowed, request: Request) -> str | None:  # type: ignore[override]
        """The reason why the kernels do not support this call, or None."""
        return declined_windows(leaf, request) or refuses_widths("windows", request)

    def forward(  # type: ignore[override]
        self, leaf: Windowed, x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        """The output (b, t, h, e) in the dtype of the values, and the residuals."""
        x = _inputs(x)
        plan = plan_of(leaf, x, interpret=self.interpret)
        result: tuple[Array, Residuals] = _forward(plan, x, _masks(frame))
        return result

    def backward(  # type: ignore[override]
        self,
        leaf: Windowed,
        x: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        """The gradients of all inputs, in their dtypes."""
        arrays, (log_total, *full) = _inputs(x), residuals
        plan = plan_of(leaf, arrays, interpret=self.interpret)
        d_out, full_out = cotangent.astype(arrays["v"].dtype), full[0] if full else out
        result = _backward(plan, arrays, _masks(frame), full_out, log_total, d_out)
        return {name: gradient.astype(x[name].dtype) for name, gradient in result.items()}


def _inputs(x: Mapping[str, Array]) -> Arrays:
    """Queries and keys in the dtype of the values."""
    dtype = x["v"].dtype
    return {**x, "q": x["q"].astype(dtype), "k": x["k"].astype(dtype)}


def _masks(frame: Frame) -> WindowMasks:
    return WindowMasks(frame.q_valid, frame.k_valid)
