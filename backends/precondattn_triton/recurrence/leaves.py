"""Leaves with a state as a backend has them: their own definition, on the recurrence in chunks.

What is one recurrence of its inputs has them read where they lie, in the call's dtype. What a leaf
makes of its inputs first (a norm, a softmax, a column of ones) is made in float32 by PyTorch, and
not rounded again. States, gates and β are in float32. For half precision, factors in float32 are
multiplied as tf32, but where outputs are divided by a sum that may cancel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from precondattn.backend import ArraySpec, Request
from precondattn.cache import Replace, Updates
from precondattn.frame import Frame
from precondattn.spec.array_functions import swap_time_and_heads
from precondattn.spec.conditioned_query import ConditionedQuery
from precondattn.spec.gsa import GSA
from precondattn.spec.linear import Linear
from precondattn.spec.linear_family import (
    LinearFamily,
    forget_other_segments,
    queries_of_states,
    rows_of_states,
    where_valid,
)
from precondattn.spec.recurrence import Stream
from precondattn_triton.precision import exact, is_half, product_precision
from precondattn_triton.recurrence.chunkwise import Chunkwise

WIDEST_KEYS, WIDEST_VALUES = 256, 512
MOST_HEADS = 65535
"""Of all sequences: a grid has no more along that axis."""

Tensors = Mapping[str, Tensor]


def is_plain(leaf: Any) -> bool:
    """Whether it is one recurrence of its own inputs."""
    return isinstance(leaf, LinearFamily) and not (isinstance(leaf, Linear) and leaf.normalize)


def _decays(leaf: Any, frame: Frame) -> bool:
    """Whether there are gates, if only those that forget other segments."""
    if isinstance(leaf, ConditionedQuery):
        decays = leaf.decay != "none"
    else:
        decays = isinstance(leaf, GSA) or leaf.offers.decay is not None
    return decays or frame.k_segment is not None


def form_of(leaf: Any, x: Tensors, frame: Frame) -> Chunkwise:
    """The recurrence in chunks as a leaf needs it."""
    dtype = x["q"].dtype
    # A sum of weights that may cancel is divided by.
    divides = isinstance(leaf, Linear) and leaf.normalize and dtype != torch.float32
    return Chunkwise(
        exact() if divides else product_precision(dtype),
        half=is_half(dtype),
        decays=_decays(leaf, frame),
        scale=leaf.scale_for(x["q"].shape[3]) if is_plain(leaf) else 1.0,
    )


def stream_of(leaf: Any, x: Tensors, frame: Frame) -> Stream:
    """Of a plain leaf: its own `stream`, but for the scale, and heads that are not repeated."""
    m = leaf.state_heads(x)
    q = x["q"]
    q = swap_time_and_heads(q)[:, :, :, None, :] if q.shape[2] < m else queries_of_states(q, m)
    if _decays(leaf, frame):
        # A decay asks of the keys how many they are, and in which dtype it is to be.
        small = {**x, "k": x["k"][..., :1].float()}
        if "g" in x:
            small["g"] = x["g"].float()
        g = forget_other_segments(leaf.log_decay(small, frame), frame)
    else:
        b, s = x["k"].shape[:2]
        g = torch.zeros((), device=q.device).expand(b, m, s, 1, 1)
    return Stream(
        q,
        where_valid(swap_time_and_heads(x["k"]), frame),
        swap_time_and_heads(x["v"]),
        g,
        swap_time_and_heads(x["beta"]) if leaf.is_delta else None,
    )


def gradients_of(leaf: Any, x: Tensors, d: Stream, frame: Frame) -> dict[str, Tensor]:
    """Of a plain leaf's inputs, from those of its stream; the form has the scale in it."""
    found: dict[str, Tensor] = replace(leaf, scale=1.0).gradients(x, d, frame)
    return found


def _wide(x: Tensors) -> dict[str, Tensor]:
    return {name: array.float() for name, array in x.items()}


def _run(leaf: Any, state: Tensors | None, x: Tensors, frame: Frame) -> tuple[Tensor, Any]:
    form = form_of(leaf, x, frame)
    state = leaf.zero_state(x) if state is None else state
    if is_plain(leaf):
        o, final = form.forward(stream_of(leaf, x, frame), state["state"])
        return rows_of_states(o), {"state": final}
    out, finals = leaf.run(state, _wide(x), frame, form)
    return out.to(x["v" if "v" in x else "q"].dtype), finals


def _run_vjp(
    leaf: Any,
    state: Tensors | None,
    x: Tensors,
    frame: Frame,
    cotangent: Tensor,
    d_state: Tensors | None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    form = form_of(leaf, x, frame)
    state = leaf.zero_state(x) if state is None else state
    d_state = leaf.zero_state(x) if d_state is None else d_state
    if is_plain(leaf):
        d_o = queries_of_states(cotangent.to(x["v"].dtype), leaf.state_heads(x))
        d = form.vjp(stream_of(leaf, x, frame), state["state"], d_o, d_state["state"])
        found, d_past = gradients_of(leaf, x, d.stream, frame), {"state": d.state}
    else:
        found, d_past = leaf.run_vjp(state, _wide(x), frame, cotangent.float(), d_state, form)
    return {name: found[name].to(array.dtype) for name, array in x.items()}, d_past


class Recurrence:
    """Of the linear family, gated slot attention, and CCQ's query."""

    def refuses(self, leaf: Any, request: Request) -> str | None:
        shapes = dict(request.shapes)
        d, e = shapes["k"][3], shapes.get("v", shapes["k"])[3]
        slots = shapes["s"][3] if isinstance(leaf, GSA) else 0
        if slots > WIDEST_KEYS:
            return f"its recurrence takes at most {WIDEST_KEYS} slots; found m={slots}"
        if d > WIDEST_KEYS or e > WIDEST_VALUES:
            return (
                f"its recurrence takes d ≤ {WIDEST_KEYS} and e ≤ {WIDEST_VALUES}; "
                f"found d={d}, e={e}"
            )
        if any(0 in shape for shape in shapes.values()):
            return "its recurrence takes no empty arrays"
        heads = max(shapes[name][2] for name in ("q", "v") if name in shapes)
        if shapes["q"][0] * heads > MOST_HEADS:
            return f"its recurrence takes at most {MOST_HEADS} heads of all sequences together"
        return None

    def forward(self, leaf: Any, x: Tensors, frame: Frame) -> tuple[Tensor, tuple[Tensor, ...]]:
        return _run(leaf, None, x, frame)[0], ()

    def backward(
        self,
        leaf: Any,
        x: Tensors,
        frame: Frame,
        out: Tensor,
        residuals: tuple[Tensor, ...],
        cotangent: Tensor,
    ) -> dict[str, Tensor]:
        return _run_vjp(leaf, None, x, frame, cotangent, None)[0]

    def step(self, leaf: Any, past: Tensors, x: Tensors, frame: Frame) -> tuple[Tensor, Updates]:
        keys = leaf.program.calls[0].slot_keys()
        own = {slot: past[key] for slot, key in keys.items()}
        out, state = _run(leaf, own, x, _of_new(frame))
        return out, {keys[slot]: Replace(value) for slot, value in state.items()}

    def step_backward(
        self,
        leaf: Any,
        past: Tensors,
        x: Tensors,
        frame: Frame,
        cotangent: Tensor,
        d_buffers: Tensors,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        keys = leaf.program.calls[0].slot_keys()
        own, d_own = (
            {slot: given[key] for slot, key in keys.items()} for given in (past, d_buffers)
        )
        gradients, d_past = _run_vjp(leaf, own, x, _of_new(frame), cotangent, d_own)
        return gradients, {keys[slot]: d_state for slot, d_state in d_past.items()}

    def residual_shapes(self, leaf: Any, inputs: Mapping[str, ArraySpec]) -> tuple[ArraySpec, ...]:
        return ()


def _of_new(frame: Frame) -> Frame:
    """Of an extension, whose frame need not be made where nothing is hidden."""
    return frame if frame.held is None else Frame(None, None)
