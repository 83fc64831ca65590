"""The shared part of linear attention, its variants with decay, and the delta rule.

    o = s SᵀQ,    S_t = Γ_t ∘ S_{t−1} + k_t u_tᵀ

A mechanism declares its `Recurrence`; which states share keys, values and queries follows from the
heads that have a state. At the first token of a packed segment the decay is
−∞, so that the state is reset. Gradient: that of the recurrence (`recurrence.py`), summed over the
heads that share an input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Flops, Inputs, Offers, Recurrence, options
from precondattn.algebra.flops import state_flops, state_heads
from precondattn.arrays import Array, Arrays, ByName, differs_from_previous, namespace, placement
from precondattn.cache import Slot
from precondattn.frame import Frame
from precondattn.spec.array_functions import (
    repeat_heads,
    sum_heads,
    swap_time_and_heads,
    where_valid,
)
from precondattn.spec.recurrence import Form, Stream
from precondattn.spec.several_steps import at_last, of_last
from precondattn.spec.stateful import Stateful

GATES = {"head": "in (-inf, 0]", "channel": "d in (-inf, 0]"}
"""The part of the pattern of g after `"b s heads"`."""
DECAYS = {"head": "head", "channel": "channel", "fixed": "retention"}
"""What a gate is for the preconditioners around it (`Offers.decay`)."""


def queries_of_states(q: Array, heads: int) -> Array:
    """Queries (b, t, h, d) as (b, heads, t, r, d), where r query heads read one state."""
    xp = namespace(q)
    b, t, h, d = q.shape
    if h < heads:
        return repeat_heads(swap_time_and_heads(q), heads)[:, :, :, None, :]
    return xp.permute_dims(xp.reshape(q, (b, t, heads, h // heads, d)), (0, 2, 1, 3, 4))


def rows_of_states(o: Array) -> Array:
    """Outputs of r queries per state (b, m, t, r, e), as rows (b, t, m r, e)."""
    b, m, t, r, e = o.shape
    xp = namespace(o)
    return xp.reshape(xp.permute_dims(o, (0, 2, 1, 3, 4)), (b, t, m * r, e))


def queries_of_rows(d_q: Array, h: int) -> Array:
    """The transpose of `queries_of_states`: gradients (b, m, t, r, d) to (b, t, h, d)."""
    if d_q.shape[1] > h:
        return swap_time_and_heads(sum_heads(d_q[:, :, :, 0, :], h))
    return rows_of_states(d_q)


def forget_other_segments(g: Array, frame: Frame) -> Array:
    """Log-decays (b, m, s, …), −∞ at the first token of every segment but the first."""
    return where_same_segment(g, frame, other=-math.inf)


def where_same_segment(
    x: Array, frame: Frame, *, other: float = 0.0, tokens: int | None = None
) -> Array:
    """x (b, m, t, …), 0 or `other` at the first token of every segment but the first.

    They are the last t of `tokens` tokens, or all of them.
    """
    if frame.k_segment is None:
        return x
    t = x.shape[2]
    begins = differs_from_previous(frame.among_keys(t if tokens is None else tokens).q_segment)
    begins = begins if tokens is None else begins[:, tokens - t :]
    return namespace(x).where(begins[:, None, :, *(None,) * (x.ndim - 3)], other, x)


@dataclass(frozen=True)
class LinearFamily(Stateful):
    """A leaf that is one recurrence on a state (d, e) for each head.

    Subclasses declare it, as in `declares = Recurrence("delta", gate="head", strength="scalar")`.
    Those whose decay is not an input g override `inputs`, `log_decay` and `log_decay_vjp`.

    Parameters
    ----------
    scale : float, optional
        The scale s; d^{-1/2} by default.
    """

    scale: float | None = options.positive_or_none()
    erase_name: ClassVar[str] = "erase"
    """The input that is the key to erase, where that is not k."""

    @property
    def declares(self) -> Recurrence:
        """The recurrence, which a subclass declares."""
        raise NotImplementedError(
            f"the class {type(self).__name__} of the mechanism {self.name!r} has no attribute "
            "`declares`, a Recurrence"
        )

    @property
    def inputs(self) -> Inputs:
        r = self.declares
        keys = "h" if r.heads == "u" else "n"
        values = "u" if r.heads == "u" else "n"
        unit = " unit row" if r.rule == "delta" else ""
        has_own_key, step = r.erase != "written key", "" if r.steps is None else f"{r.steps} "
        declared = {"k": f"b s {step}{keys} d{unit}", "v": f"b s {step}{values} e"}
        declared = {"q": "b t h d", **declared}
        if r.keys == "of the gate":
            del declared["k"]
        if r.gate in GATES:
            declared["g"] = f"b s {r.heads} {GATES[r.gate]}"
        if r.strength == "scalar":
            declared["beta"] = f"b s {step}{r.heads} in [0, {1 if has_own_key else 2}]"
        if r.strength == "channel":
            declared["b"] = f"b s {r.heads} d in [0, {1 if has_own_key else 2}]"
            declared["w"] = f"b s {r.heads} e in [0, 1]"
        if has_own_key:
            declared[self.erase_name] = f"b s {keys} d unit row"
        return Inputs(**declared)

    @property
    def output(self) -> str:  # type: ignore[override]
        return "b t u e" if self.declares.heads == "u" else "b t h e"

    @property
    def offers(self) -> Offers:
        r = self.declares
        decay, several_keys = DECAYS.get(r.gate or ""), r.steps is not None
        unit_keys = r.rule == "delta"
        return Offers(scale=self.scale, decay=decay, unit_keys=unit_keys, several_keys=several_keys)

    def slots(self) -> tuple[Slot, ...]:
        written = ", ".join(f"{{{name}}}" for name in self.inputs if name != "q")
        history = f"{self.name}.state({written})"
        return (Slot("state", history, f"b {self.declares.heads} d e", wide=True, symbol="S"),)

    def flops(self, sizes: Mapping[str, int]) -> Flops | None:
        """The FLOPs of the steps of one d × e state for each head that reads one."""
        is_delta = not self.declares.is_diagonal
        each = state_flops(sizes["s"], sizes["d"], sizes["e"], is_delta=is_delta)
        return each.times(state_heads(sizes) * self.steps_per_token)

    def state_heads(self, x: ByName) -> int:
        """The number of heads with a state."""
        return int(x["q" if self.declares.heads == "h" else "v"].shape[-2])

    def log_decay(self, x: ByName, frame: Frame) -> Array:
        """The log-decay (b, m, s, 1 or d, 1)."""
        gate = self.declares.gate
        if gate is None:
            k = x["k"]
            b, s = k.shape[:2]
            shape = (b, self.state_heads(x), s, 1, 1)
            return namespace(k).zeros(shape, dtype=k.dtype, **placement(k))
        g = swap_time_and_heads(x["g"])
        return g[..., None] if gate == "channel" else g[..., None, None]

    def log_decay_vjp(self, x: ByName, d_g: Array, frame: Frame) -> Arrays:
        """The gradients of the inputs of `log_decay`, from that of its result."""
        gate = self.declares.gate
        if gate not in GATES:
            return {}
        return {"g": swap_time_and_heads(d_g[..., 0] if gate == "channel" else d_g[..., 0, 0])}

    def keys(self, x: ByName) -> Array:
        """The keys that are written, as the input k."""
        return x["k"] if self.declares.keys == "given" else -namespace(x["g"]).expm1(x["g"])

    def erased(self, x: ByName, frame: Frame) -> Arrays:
        """The keys that are erased (b, h, s, d), by their name in the stream, if not k."""
        erase = self.declares.erase
        if erase == "written key":
            return {}
        key = swap_time_and_heads(x[self.erase_name])
        if erase == "own key":
            return {"erase": key}
        # At the first token of a segment, the earlier state belongs to another segment.
        return {"undecayed": where_same_segment(key, frame)}

    def erased_vjp(self, x: ByName, d: Stream, frame: Frame) -> Arrays:
        """The gradients of the inputs of `erased`, from those of the stream."""
        erase = self.declares.erase
        if erase == "written key":
            return {}
        d_key = d.erase if erase == "own key" else where_same_segment(d.undecayed, frame)
        d_key = sum_heads(d_key, x[self.erase_name].shape[2])
        return {self.erase_name: swap_time_and_heads(d_key)}

    def stream(self, x: ByName, frame: Frame) -> Stream:
        """The inputs in the layout of the recurrence."""
        m = self.state_heads(x)
        return Stream(
            self.scale_for(x["q"].shape[3]) * queries_of_states(x["q"], m),
            # Padded keys are 0 in the call, but not after a feature map.
            where_valid(repeat_heads(swap_time_and_heads(self.keys(x)), m), frame),
            repeat_heads(swap_time_and_heads(x["v"]), m),
            forget_other_segments(self.log_decay(x, frame), frame),
            swap_time_and_heads(x["beta"]) if self.declares.strength == "scalar" else None,
            **{name: repeat_heads(keys, m) for name, keys in self.erased(x, frame).items()},
        )

    def gradients(self, x: ByName, d: Stream, frame: Frame) -> Arrays:
        """The gradients of the inputs, from those of the stream."""
        is_given = self.declares.keys == "given"
        d_k = sum_heads(where_valid(d.k, frame), x["k" if is_given else "g"].shape[2])
        d_k = swap_time_and_heads(d_k)
        gradients = {
            "q": self.scale_for(x["q"].shape[3]) * queries_of_rows(d.q, x["q"].shape[2]),
            "v": swap_time_and_heads(sum_heads(d.v, x["v"].shape[2])),
            **self.log_decay_vjp(x, d.g, frame),
        }
        if is_given:
            gradients["k"] = d_k
        else:
            gradients["g"] = gradients["g"] - namespace(d_k).exp(x["g"]) * d_k
        if d.beta is not None:
            gradients["beta"] = swap_time_and_heads(d.beta)
        for name, d_erased in self.erased_vjp(x, d, frame).items():
            # A key that is both erased and written has two gradients.
            gradients[name] = gradients[name] + d_erased if name in gradients else d_erased
        return gradients

    def run(self, state: ByName, x: ByName, frame: Frame, form: Form) -> tuple[Array, Arrays]:
        o, final = form.forward(self.stream(x, frame), state["state"])
        return rows_of_states(of_last(o, self.steps_per_token)), {"state": final}

    def run_vjp(
        self, state: ByName, x: ByName, frame: Frame, cotangent: Array, d_state: ByName, form: Form
    ) -> tuple[Arrays, Arrays]:
        stream = self.stream(x, frame)
        d_o = at_last(queries_of_states(cotangent, stream.k.shape[1]), self.steps_per_token)
        d = form.vjp(stream, state["state"], d_o, d_state["state"])
        return self.gradients(x, d.stream, frame), {"state": d.state}
