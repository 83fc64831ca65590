"""Leaves with a state on a backend's kernels for chunked recurrences.

A "plain" leaf is one recurrence of its inputs, which are passed to the kernels as they are stored.
Other leaves first compute something from their inputs, in float32. The kernels multiply the outputs
of the linear family by its scale, because scaling the queries would round them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from precondattn.arrays import cast, namespace, placement, upcast, upcast_all
from precondattn.backend import ArraySpec, Request
from precondattn.cache import Replace, Updates
from precondattn.frame import Frame
from precondattn.frameworks.types import Array, Arrays, ByName, DType, Residuals
from precondattn.kernel_backend.limits import MOST_HEADS
from precondattn.spec.array_functions import swap_time_and_heads, where_valid
from precondattn.spec.linear_family import (
    LinearFamily,
    forget_other_segments,
    queries_of_states,
    rows_of_states,
)
from precondattn.spec.recurrence import Form, Stream, StreamGradients
from precondattn.spec.stateful import Stateful

WIDEST_KEYS, WIDEST_VALUES = 256, 512

State = ByName | None


def is_linear(leaf: Stateful) -> TypeGuard[LinearFamily]:
    """Whether a leaf is one recurrence with a scale, whose output is not part of a sum."""
    if not isinstance(leaf, LinearFamily):
        return False
    return leaf.declares.normaliser is None and leaf.declares.reads == "after"


def is_plain(leaf: Stateful) -> TypeGuard[LinearFamily]:
    """Whether a leaf is one recurrence of its own inputs."""
    return is_linear(leaf) and not computes_rows(leaf)


def computes_rows(leaf: Stateful) -> bool:
    """Whether a leaf first computes the rows of its recurrence."""
    r = leaf.declares
    return r is not None and (
        r.reads == "before, with a bonus"
        or r.keys == "of the gate"
        or r.strength == "channel"
        or r.rule == "low rank"
        or r.steps is not None
    )


def decays(leaf: Stateful, frame: Frame) -> bool:
    """Whether the recurrence has gates; packed segments need them, with a gate of −∞ at borders."""
    return frame.k_segment is not None or bool(leaf.has_decay)


def scale_in_form(leaf: Stateful, x: ByName) -> float:
    """The scale by which the form multiplies the outputs, for the linear family; otherwise 1."""
    return float(leaf.scale_for(x["q"].shape[3])) if is_linear(leaf) else 1.0


def unscaled(leaf: Stateful) -> Stateful:
    """The leaf without the scale that the form applies."""
    return replace(leaf, scale=1.0) if is_linear(leaf) else leaf


def stream_of(leaf: LinearFamily, x: ByName, frame: Frame, *, widen: bool = True) -> Stream:
    """The recurrence inputs of a plain leaf, without its scale and without repeated heads."""
    m = leaf.state_heads(x)
    q, k = x["q"], x["k"]
    q = swap_time_and_heads(q)[:, :, :, None, :] if q.shape[2] < m else queries_of_states(q, m)
    return Stream(
        q,
        where_valid(swap_time_and_heads(k), frame),
        swap_time_and_heads(x["v"]),
        _gates(leaf, x, frame, widen=widen),
        swap_time_and_heads(x["beta"]) if leaf.declares.strength == "scalar" else None,
        **leaf.erased(x, frame),
    )


def _gates(leaf: LinearFamily, x: ByName, frame: Frame, *, widen: bool) -> Array:
    """The gates (b, m, s, 1 or d, 1); a broadcast 0 without decay."""
    k = x["k"]
    if not decays(leaf, frame):
        xp = namespace(k)
        zero = xp.zeros((), dtype=xp.float32, **placement(k))
        return xp.broadcast_to(zero, (k.shape[0], leaf.state_heads(x), k.shape[1], 1, 1))
    if "g" in x:
        small = {**x, "g": upcast(x["g"])} if widen else x
    else:  # A fixed decay needs only the number of keys and a dtype: one channel is enough.
        small = {**x, "k": upcast(k[..., :1])}
    return forget_other_segments(leaf.log_decay(small, frame), frame)


def gradients_of(leaf: LinearFamily, x: ByName, d: Stream, frame: Frame) -> Arrays:
    """The gradients of a plain leaf's inputs, from the gradients of its scaled stream."""
    return replace(leaf, scale=1.0).gradients(x, d, frame)


class Rounded:
    """A form whose rows are cast to the call's dtype, for leaves that compute their rows."""

    def __init__(self, form: Form, dtype: DType) -> None:
        self.form, self.dtype = form, dtype
        self.by_tokens, self.read = form.by_tokens, form.read

    def forward(self, x: Stream, state: Array) -> tuple[Array, Array]:
        return self.form.forward(self._rounded(x), state)

    def vjp(self, x: Stream, state: Array, d_o: Array, d_final: Array) -> StreamGradients:
        return self.form.vjp(self._rounded(x), state, cast(d_o, self.dtype), d_final)

    def _rounded(self, x: Stream) -> Stream:
        rows = {name: getattr(x, name) for name in ("q", "k", "v", "erase", "undecayed")}
        return x._replace(**{n: cast(a, self.dtype) for n, a in rows.items() if a is not None})


class StatefulKernels:
    """The base class of kernels for leaves with a state; a subclass defines `form`."""

    widens_gates = True
    """Whether the form needs the gates of a plain leaf in float32."""
    has_zero_state = False
    """Whether None is a state of 0 for the form, and a gradient of 0 of the last state."""

    def form(self, leaf: Stateful, x: ByName, frame: Frame) -> Form:
        """The chunked recurrence for a leaf and its inputs.

        It multiplies outputs by `scale_in_form`, and has gates if `decays` is True.
        """
        raise NotImplementedError

    def widest_keys(self, leaf: Stateful, dtype: str) -> int:
        """The largest supported width of the keys of a leaf, in a call of this dtype."""
        return WIDEST_KEYS

    def refuses(self, leaf: Stateful, request: Request) -> str | None:
        """The reason why the kernels do not support a request; None where they do."""
        shapes = dict(request.shapes)
        k = shapes.get("k") or shapes["g"]  # The keys may be derived from the gate.
        d, e = k[-1], shapes.get("v", k)[-1]
        slots = shapes["s"][3] if "s" in shapes else 0
        if slots > WIDEST_KEYS:
            return f"its recurrence supports at most {WIDEST_KEYS} slots; found m={slots}"
        if d > (widest := self.widest_keys(leaf, request.dtype)) or e > WIDEST_VALUES:
            return (
                f"its recurrence supports d <= {widest} and e <= {WIDEST_VALUES}; "
                f"found d={d}, e={e}"
            )
        if any(0 in shape for shape in shapes.values()):
            return "its recurrence supports no empty arrays"
        heads = max(shapes[name][-2] for name in ("q", "k", "v") if name in shapes)
        if k[0] * heads > MOST_HEADS:
            return f"its recurrence supports at most {MOST_HEADS} heads of all sequences together"
        return None

    def _form(self, leaf: Stateful, x: ByName, frame: Frame) -> Form:
        form = self.form(leaf, x, frame)
        return Rounded(form, x["q"].dtype) if computes_rows(leaf) else form

    def _zero_state(self, leaf: Stateful, x: ByName) -> ByName:
        is_none = self.has_zero_state and is_plain(leaf)
        return {"state": None} if is_none else leaf.zero_state(x)

    def run(self, leaf: Stateful, state: State, x: ByName, frame: Frame) -> tuple[Array, Arrays]:
        """The output, and the new state, from an old state."""
        form = self._form(leaf, x, frame)
        state = self._zero_state(leaf, x) if state is None else state
        if is_plain(leaf):
            stream = stream_of(leaf, x, frame, widen=self.widens_gates)
            o, final = form.forward(stream, state["state"])
            return rows_of_states(o), {"state": final}
        out, finals = unscaled(leaf).run(state, upcast_all(x), frame, form)
        return cast(out, next(x[name].dtype for name in "vqk" if name in x)), finals

    def run_vjp(
        self, leaf: Stateful, state: State, x: ByName, frame: Frame, cotangent: Array, d_new: State
    ) -> tuple[Arrays, Arrays]:
        """The gradients of inputs and old state, from those of the output and the new state."""
        form = self._form(leaf, x, frame)
        d_new = self._zero_state(leaf, x) if d_new is None else d_new
        state = self._zero_state(leaf, x) if state is None else state
        if is_plain(leaf):
            d_o = queries_of_states(cast(cotangent, x["v"].dtype), leaf.state_heads(x))
            stream = stream_of(leaf, x, frame, widen=self.widens_gates)
            d = form.vjp(stream, state["state"], d_o, d_new["state"])
            gradients, d_past = gradients_of(leaf, x, d.stream, frame), {"state": d.state}
        else:
            gradients, d_past = unscaled(leaf).run_vjp(
                state, upcast_all(x), frame, upcast(cotangent), d_new, form
            )
        return {name: cast(gradients[name], array.dtype) for name, array in x.items()}, d_past

    def forward(self, leaf: Stateful, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        return self.run(leaf, None, x, frame)[0], ()

    def backward(
        self,
        leaf: Stateful,
        x: ByName,
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        return self.run_vjp(leaf, None, x, frame, cotangent, None)[0]

    def frame_of_step(self, frame: Frame) -> Frame:
        """The frame of an extension, without masks and number of tokens if nothing is masked."""
        return frame if frame.held is None else Frame(None, None)

    def step(self, leaf: Stateful, past: ByName, x: ByName, frame: Frame) -> tuple[Array, Updates]:
        keys = leaf.program.slot_keys[0]
        state = {slot: past[key] for slot, key in keys.items()}
        out, final = self.run(leaf, state, x, frame)
        return out, {keys[slot]: Replace(value) for slot, value in final.items()}

    def step_backward(
        self, leaf: Stateful, past: ByName, x: ByName, frame: Frame, cotangent: Array, d_new: ByName
    ) -> tuple[Arrays, Arrays]:
        keys = leaf.program.slot_keys[0]
        state = {slot: past[key] for slot, key in keys.items()}
        d_state = {slot: d_new[key] for slot, key in keys.items()}
        gradients, d_past = self.run_vjp(leaf, state, x, frame, cotangent, d_state)
        return gradients, {keys[slot]: d_slot for slot, d_slot in d_past.items()}

    def residual_shapes(self, leaf: Stateful, inputs: ByName) -> tuple[ArraySpec, ...]:
        return ()
