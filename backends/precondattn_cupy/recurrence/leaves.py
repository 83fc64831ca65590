"""Leaves with a state as a backend has them: their own definition, on the recurrence in chunks.

What is one recurrence of its inputs has them read where they lie, in the call's dtype. What a leaf
makes of its inputs first (a norm, a column of ones) is made in float32, and multiplied in float32.
States, gates and β are in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from precondattn.arrays import Array, cast, namespace, upcast_all
from precondattn.backend import ArraySpec, Request
from precondattn.cache import Replace, Updates
from precondattn.frame import Frame
from precondattn.spec.array_functions import swap_time_and_heads
from precondattn.spec.conditioned_query import ConditionedQuery
from precondattn.spec.linear import Linear
from precondattn.spec.linear_family import (
    LinearFamily,
    forget_other_segments,
    queries_of_states,
    rows_of_states,
    where_valid,
)
from precondattn.spec.recurrence import Stream
from precondattn_cupy.recurrence.chunkwise import Chunkwise

WIDEST_KEYS, WIDEST_VALUES = 256, 512
MOST_HEADS = 65535
"""Of all sequences: a grid has no more along that axis."""

Arrays = Mapping[str, Array]


def _is_plain(leaf: Any) -> bool:
    """Whether it is one recurrence of its own inputs."""
    return isinstance(leaf, LinearFamily) and not (isinstance(leaf, Linear) and leaf.normalize)


def _form(leaf: Any, x: Arrays, frame: Frame) -> Chunkwise:
    if isinstance(leaf, ConditionedQuery):
        decays = leaf.decay != "none"
    else:
        decays = leaf.offers.decay is not None
    # A gate of −∞ forgets other segments.
    return Chunkwise(
        decays=decays or frame.k_segment is not None,
        scale=leaf.scale_for(x["q"].shape[3]) if _is_plain(leaf) else 1.0,
    )


def _stream(leaf: Any, x: Arrays, frame: Frame, decays: bool) -> Stream:
    """Of a plain leaf: its own `stream`, but for the scale, and heads that are not repeated."""
    m = leaf.state_heads(x)
    q, k = x["q"], x["k"]
    q = swap_time_and_heads(q)[:, :, :, None, :] if q.shape[2] < m else queries_of_states(q, m)
    return Stream(
        q,
        where_valid(swap_time_and_heads(k), frame),
        swap_time_and_heads(x["v"]),
        _gates(leaf, x, frame) if decays else _no_gates(k, m),
        swap_time_and_heads(x["beta"]) if leaf.is_delta else None,
    )


def _gates(leaf: Any, x: Arrays, frame: Frame) -> Array:
    """(b, m, s, 1, 1) in float32."""
    # A decay that is no input asks of the keys how many they are, and in which dtype it is to be.
    asked = {"g": x["g"]} if "g" in x else {"k": x["k"][..., :1]}
    return forget_other_segments(leaf.log_decay({**x, **upcast_all(asked)}, frame), frame)


def _no_gates(k: Array, m: int) -> Array:
    xp, (b, s) = namespace(k), k.shape[:2]
    return xp.broadcast_to(xp.zeros_like(k[:1, :1, :1, :1, None]), (b, m, s, 1, 1))


def _run(
    leaf: Any, state: Arrays | None, x: Arrays, frame: Frame
) -> tuple[Array, dict[str, Array]]:
    form = _form(leaf, x, frame)
    state = leaf.zero_state(x) if state is None else state
    if _is_plain(leaf):
        o, final = form.forward(_stream(leaf, x, frame, form.decays), state["state"])
        return rows_of_states(o), {"state": final}
    out, finals = leaf.run(state, upcast_all(x), frame, form)
    dtype = x["v" if "v" in x else "q"].dtype
    return cast(out, dtype), finals


def _run_vjp(
    leaf: Any,
    state: Arrays | None,
    x: Arrays,
    frame: Frame,
    cotangent: Array,
    d_state: Arrays | None,
) -> tuple[dict[str, Array], dict[str, Array]]:
    form = _form(leaf, x, frame)
    state = leaf.zero_state(x) if state is None else state
    d_state = leaf.zero_state(x) if d_state is None else d_state
    if _is_plain(leaf):
        d_o = queries_of_states(cotangent, leaf.state_heads(x))
        stream = _stream(leaf, x, frame, form.decays)
        d = form.vjp(stream, state["state"], d_o, d_state["state"])
        # The form has the scale in it.
        found = replace(leaf, scale=1.0).gradients(x, d.stream, frame)
        d_past = {"state": d.state}
    else:
        wide = upcast_all({**x, "cotangent": cotangent})
        cotangent = wide.pop("cotangent")
        found, d_past = leaf.run_vjp(state, wide, frame, cotangent, d_state, form)
    return {name: cast(found[name], array.dtype) for name, array in x.items()}, d_past


class Recurrence:
    """Of the linear family with a decay for each token at most, and CCQ's query."""

    def refuses(self, leaf: Any, request: Request) -> str | None:
        shapes = dict(request.shapes)
        d, e = shapes["k"][3], shapes.get("v", shapes["k"])[3]
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

    def forward(self, leaf: Any, x: Arrays, frame: Frame) -> tuple[Array, tuple[Array, ...]]:
        return _run(leaf, None, x, frame)[0], ()

    def backward(
        self,
        leaf: Any,
        x: Arrays,
        frame: Frame,
        out: Array,
        residuals: tuple[Array, ...],
        cotangent: Array,
    ) -> dict[str, Array]:
        return _run_vjp(leaf, None, x, frame, cotangent, None)[0]

    def step(self, leaf: Any, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        keys = leaf.program.calls[0].slot_keys()
        own = {slot: past[key] for slot, key in keys.items()}
        out, state = _run(leaf, own, x, _of_new(frame))
        return out, {keys[slot]: Replace(value) for slot, value in state.items()}

    def step_backward(
        self,
        leaf: Any,
        past: Arrays,
        x: Arrays,
        frame: Frame,
        cotangent: Array,
        d_buffers: Arrays,
    ) -> tuple[dict[str, Array], dict[str, Array]]:
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
