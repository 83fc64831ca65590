"""Leaves with a state: each leaf's definition, with the recurrence computed in chunks by kernels.

Inputs have the call's dtype. XLA computes the recurrence's inputs from them in float32, and rounds
them for the kernels' products; states, gates and β stay in float32. For bfloat16, factors in
float32 are multiplied as tf32.

The scale s of the linear family is not multiplied into q, which would round q again, but into the
output. Gradients are linear in the cotangents of the output and of the final state,

    backward(s do, dS) = s backward(do, dS / s).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp

from precondattn.arrays import Array, Arrays, DType, upcast_all
from precondattn.execution.masks import zero_padding
from precondattn.frame import Frame
from precondattn.kernel_backend.stateful import (
    StatefulKernels,
    decays,
    scale_in_form,
    unscaled,
)
from precondattn.spec.recurrence import Form
from precondattn.spec.stateful import Stateful
from precondattn_pallas.arrays import where_valid
from precondattn_pallas.launch import Interpret
from precondattn_pallas.precision import products
from precondattn_pallas.recurrence.chunkwise import Chunkwise

T = TypeVar("T")

Masks = tuple[Array, Array, Array]
"""Valid queries, valid keys, and the keys' segments; None where all are valid, or where there is
one segment."""

FormOf = Callable[..., Form]
"""A function (dtype of inputs, dtype of q, k and v, *, decays, interpret) that returns a form."""


def on_a_gpu(dtype: DType, operands: Array, *, decays: bool, interpret: bool) -> Form:
    return Chunkwise(products(dtype, interpret=interpret), operands, decays=decays)


def _form(
    form_of: FormOf, leaf: Stateful, dtype: DType, masks: Masks, interpret: Interpret
) -> Form:
    """The form for inputs of a dtype."""
    # q and k that were just computed in float32 (unit rows, a softmax, squares) are not rounded.
    computed = leaf.declares is None or leaf.declares.rule == "slots"
    operands = jnp.float32 if computed else dtype
    return form_of(dtype, operands, decays=decays(leaf, _frame(masks)), interpret=interpret)


def _frame(masks: Masks) -> Frame:
    q_valid, k_valid, k_segment = masks
    return Frame(None, None, q_valid, k_valid, None, k_segment)


def _wide(leaf: Stateful, x: Mapping[str, Array], masks: Masks) -> Arrays:
    """Inputs in float32, with zeros at padding and masked keys."""
    q_valid, k_valid, _ = masks
    return upcast_all(zero_padding(x, leaf.inputs, q_valid, k_valid))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    form_of: FormOf, leaf: Stateful, interpret: Interpret, state: Array, x: Arrays, masks: Masks
) -> Array:
    dtype = _keys(x).dtype
    x = _wide(leaf, x, masks)
    state = leaf.zero_state(x) if state is None else state
    form = _form(form_of, leaf, dtype, masks, interpret)
    scale = scale_in_form(leaf, x)
    out, final = unscaled(leaf).run(state, x, _frame(masks), form)
    return (scale * out).astype(dtype), final


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run_vjp(
    form_of: FormOf,
    leaf: Stateful,
    interpret: Interpret,
    state: Array,
    x: Arrays,
    masks: Masks,
    cotangent: Array,
    d_state: Array,
) -> Array:
    dtypes = {name: array.dtype for name, array in x.items()}
    x = _wide(leaf, x, masks)
    state = leaf.zero_state(x) if state is None else state
    d_state = leaf.no_cotangents(state) if d_state is None else d_state
    form = _form(form_of, leaf, _keys(dtypes), masks, interpret)
    cotangent = where_valid(masks[0], cotangent).astype(jnp.float32)
    scale, leaf = scale_in_form(leaf, x), unscaled(leaf)
    d_state = {slot: each / scale for slot, each in d_state.items()}
    gradients, d_past = leaf.run_vjp(state, x, _frame(masks), cotangent, d_state, form)
    d_past = {slot: scale * each for slot, each in d_past.items()}
    return {n: (scale * gradients[n]).astype(dtype) for n, dtype in dtypes.items()}, d_past


class RecurrenceKernels(StatefulKernels):
    """The linear family (GLA, GatedDelta, KDA …), GSA, CCQ's query, and the key that ATK writes.

    A run is one compiled function of arrays, so a frame is passed to it as its masks.
    """

    form_of: FormOf = staticmethod(on_a_gpu)

    def __init__(self, *, interpret: Interpret) -> None:
        self.interpret = interpret

    def run(self, leaf: Stateful, state: Array, x: Mapping[str, Array], frame: Frame) -> Array:
        return _run(self.form_of, leaf, self.interpret, state, dict(x), _masks(frame, x))

    def run_vjp(
        self,
        leaf: Stateful,
        state: Array,
        x: Mapping[str, Array],
        frame: Frame,
        cotangent: Array,
        d_state: Array,
    ) -> Array:
        static = self.form_of, leaf, self.interpret
        return _run_vjp(*static, state, dict(x), _masks(frame, x), cotangent, d_state)


def _keys(of_inputs: Mapping[str, T]) -> T:
    """The inputs that belong to the keys, or to the values if keys are computed from the gate."""
    return of_inputs["k" if "k" in of_inputs else "v"]


def _masks(frame: Frame, x: Mapping[str, Array]) -> Masks:
    """The masks of a full call, or of the new tokens of an extension, which are the last keys."""
    k_valid, s = frame.k_valid, _keys(x).shape[1]
    if k_valid is not None and k_valid.shape[1] > s:
        k_valid = k_valid[:, -s:]
    return frame.q_valid, k_valid, frame.k_segment
