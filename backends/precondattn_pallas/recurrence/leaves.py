"""Leaves with a state as a backend has them: their own definition, on the recurrence in chunks.

Their inputs come in the call's dtype. What a leaf makes of them for the recurrence is made in
float32, by XLA, and rounded again for the products of the kernels; states, gates and β stay in
float32. For bfloat16, factors in float32 are multiplied as tf32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from precondattn.arrays import upcast_all
from precondattn.backend import ArraySpec, Request
from precondattn.cache import Replace, Updates
from precondattn.execution.masks import zero_padding
from precondattn.frame import Frame
from precondattn.spec.conditioned_query import ConditionedQuery
from precondattn.spec.gsa import GSA
from precondattn.spec.recurrence import Form
from precondattn_pallas.masks import where_valid
from precondattn_pallas.precision import products
from precondattn_pallas.recurrence.chunkwise import Chunkwise

WIDEST_KEYS, WIDEST_VALUES = 256, 512
MOST_HEADS = 65535
"""Of all sequences: a grid has no more along that axis."""

Masks = tuple[Any, Any, Any]
"""Of queries and keys, which count, and the keys' segments; None where all do, or there is one."""


FormOf = Callable[..., Form]
"""(dtype of the inputs, dtype of q, k and v in the form, *, decays, interpret) → the form."""


def on_a_gpu(dtype: Any, operands: Any, *, decays: bool, interpret: bool) -> Form:
    return Chunkwise(products(dtype, interpret=interpret), operands, decays=decays)


def _form(form_of: FormOf, leaf: Any, dtype: Any, masks: Masks, interpret: Any) -> Form:
    """For inputs of a dtype."""
    if isinstance(leaf, ConditionedQuery):
        decays = leaf.decay != "none"
    else:
        decays = "g" in leaf.inputs or leaf.offers.decay is not None
    decays = decays or masks[2] is not None
    # What has just been made in float32, rows of length 1 or a softmax, is not rounded again.
    operands = jnp.float32 if isinstance(leaf, (ConditionedQuery, GSA)) else dtype
    return form_of(dtype, operands, decays=decays, interpret=interpret)


def _frame(masks: Masks) -> Frame:
    q_valid, k_valid, k_segment = masks
    return Frame(None, None, q_valid, k_valid, None, k_segment)


def _wide(leaf: Any, x: Mapping[str, Any], masks: Masks) -> dict[str, Any]:
    """Inputs in float32, with zeros at tokens that do not count."""
    q_valid, k_valid, _ = masks
    return upcast_all(zero_padding(x, leaf.inputs, q_valid, k_valid))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run(form_of: FormOf, leaf: Any, interpret: Any, state: Any, x: Any, masks: Masks) -> Any:
    dtype = x["q"].dtype
    x = _wide(leaf, x, masks)
    state = leaf.zero_state(x) if state is None else state
    out, final = leaf.run(state, x, _frame(masks), _form(form_of, leaf, dtype, masks, interpret))
    return out.astype(dtype), final


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run_vjp(
    form_of: FormOf,
    leaf: Any,
    interpret: Any,
    state: Any,
    x: Any,
    masks: Masks,
    cotangent: Any,
    d_state: Any,
) -> Any:
    dtypes = {name: array.dtype for name, array in x.items()}
    x = _wide(leaf, x, masks)
    state = leaf.zero_state(x) if state is None else state
    d_state = leaf.zero_state(x) if d_state is None else d_state
    form = _form(form_of, leaf, dtypes["q"], masks, interpret)
    cotangent = where_valid(masks[0], cotangent).astype(jnp.float32)
    found, d_past = leaf.run_vjp(state, x, _frame(masks), cotangent, d_state, form)
    return {name: found[name].astype(dtype) for name, dtype in dtypes.items()}, d_past


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _extended(form_of: FormOf, leaf: Any, interpret: Any, state: Any, x: Any, masks: Masks) -> Any:
    """The output and the new state. An extension is differentiated by JAX, kernels can not be."""
    return _run(form_of, leaf, interpret, state, x, masks)


def _extended_forward(
    form_of: FormOf, leaf: Any, interpret: Any, state: Any, x: Any, masks: Masks
) -> Any:
    return _run(form_of, leaf, interpret, state, x, masks), (state, x, masks)


def _extended_backward(
    form_of: FormOf, leaf: Any, interpret: Any, kept: Any, cotangents: Any
) -> Any:
    state, x, masks = kept
    d_out, d_final = cotangents
    d_x, d_state = _run_vjp(form_of, leaf, interpret, state, x, masks, d_out, d_final)
    return d_state, d_x, None


_extended.defvjp(_extended_forward, _extended_backward)


class Recurrence:
    """Of leaves of the linear family, of GSA, and of CCQ's query."""

    form_of: FormOf = staticmethod(on_a_gpu)

    def __init__(self, *, interpret: Any) -> None:
        self.interpret = interpret

    def refuses(self, leaf: Any, request: Request) -> str | None:
        shapes = dict(request.shapes)
        d, e = shapes["k"][3], shapes.get("v", shapes["k"])[3]
        if d > WIDEST_KEYS or e > WIDEST_VALUES:
            return (
                f"its recurrence takes d ≤ {WIDEST_KEYS} and e ≤ {WIDEST_VALUES}; "
                f"found d={d}, e={e}"
            )
        if "s" in shapes and shapes["s"][3] > WIDEST_KEYS:
            return f"its recurrence takes at most {WIDEST_KEYS} slots; found {shapes['s'][3]}"
        if any(0 in shape for shape in shapes.values()):
            return "its recurrence takes no empty arrays"
        heads = max(shapes[name][2] for name in ("q", "v") if name in shapes)
        if shapes["q"][0] * heads > MOST_HEADS:
            return f"its recurrence takes at most {MOST_HEADS} heads of all sequences together"
        return None

    def forward(self, leaf: Any, x: Mapping[str, Any], frame: Frame) -> tuple[Any, tuple[Any, ...]]:
        masks = frame.q_valid, frame.k_valid, frame.k_segment
        return _run(self.form_of, leaf, self.interpret, None, dict(x), masks)[0], ()

    def backward(
        self,
        leaf: Any,
        x: Mapping[str, Any],
        frame: Frame,
        out: Any,
        residuals: tuple[Any, ...],
        cotangent: Any,
    ) -> dict[str, Any]:
        masks = frame.q_valid, frame.k_valid, frame.k_segment
        found = _run_vjp(self.form_of, leaf, self.interpret, None, dict(x), masks, cotangent, None)
        gradients: dict[str, Any] = found[0]
        return gradients

    def step(
        self, leaf: Any, past: Mapping[str, Any], x: Mapping[str, Any], frame: Frame
    ) -> tuple[Any, Updates]:
        keys = leaf.program.calls[0].slot_keys()
        own = {slot: past[key] for slot, key in keys.items()}
        out, state = _extended(self.form_of, leaf, self.interpret, own, dict(x), _new(frame, x))
        return out, {keys[slot]: Replace(value) for slot, value in state.items()}

    def step_backward(
        self,
        leaf: Any,
        past: Mapping[str, Any],
        x: Mapping[str, Any],
        frame: Frame,
        cotangent: Any,
        d_buffers: Mapping[str, Any],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        keys = leaf.program.calls[0].slot_keys()
        own, d_own = (
            {slot: given[key] for slot, key in keys.items()} for given in (past, d_buffers)
        )
        gradients, d_past = _run_vjp(
            self.form_of, leaf, self.interpret, own, dict(x), _new(frame, x), cotangent, d_own
        )
        return gradients, {keys[slot]: d_state for slot, d_state in d_past.items()}

    def residual_shapes(self, leaf: Any, inputs: Mapping[str, ArraySpec]) -> tuple[ArraySpec, ...]:
        return ()


def _new(frame: Frame, x: Mapping[str, Any]) -> Masks:
    """Of an extension, whose new tokens are the last keys."""
    if frame.held is not None:
        return None, None, None
    k_valid = frame.k_valid
    return frame.q_valid, None if k_valid is None else k_valid[:, -x["k"].shape[1] :], None
