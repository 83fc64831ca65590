"""Softmax attention.

    S = s ⟨q, k⟩ + bias,    A = softmax(S + mask),    o = A v

with s = d^{-1/2} unless given, and optionally a forget gate (`forget_gate.py`) and what a distance
adds (`distance.py`) in S. Source: Vaswani et al. 2017; LUCID 3.1, LASER Eq. 2.

The weights are computed as logarithms, log a_ij = S_ij − λ_i, λ_i = log Σ_l e^{S_il} over the
unmasked keys. A sink is one more column in the denominator, without a value, with a learnt logit σ
for each query head: λ_i = log(e^σ + Σ_l e^{S_il}). A row without visible keys then has λ = σ and
o = 0. Sources: gpt-oss (arXiv 2508.10925) 2; Xiao et al. 2023 (arXiv 2309.17453), where the sink
has a key and a value. A soft cap c replaces s ⟨q, k⟩ by c tanh(s ⟨q, k⟩ / c), before a decay or a
bias is added. Source: Gemma 2 (arXiv 2408.00118) 2.

Gradient, with dS and dλ from the read (`read.py`, `laser.py`):

    (dq, dk) = s · vjp of ⟨q, k⟩ at dS (times 1 − tanh²(s ⟨q, k⟩ / c)),    dbias = dS,
    dσ = Σ_i e^{σ − λ_i} dλ_i.

Cache: keys and values, and the decay of a forget gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from precondattn.algebra import Flops, Inputs, Leaf, Offers, Pattern, options
from precondattn.algebra.flops import visible_keys, visible_pairs
from precondattn.arrays import Array, Arrays, ByName, Residuals, as_index, namespace
from precondattn.cache import Append, Slot, Updates
from precondattn.frame import Frame
from precondattn.spec import forget_gate
from precondattn.spec.array_functions import (
    input_gradients,
    log_softmax,
    mask_scores,
    repeat_heads,
    sum_heads,
    sum_to,
    swap_time_and_heads,
)
from precondattn.spec.distance import (
    BUCKETS,
    LONGEST_OF_T5,
    MOST_BUCKETS,
    check_distance,
    distance_input,
    distance_scores,
    distance_vjp,
)
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.metric import DOT, Metric, cached_keys
from precondattn.spec.read import MEAN, MEAN_AND_LOG_SUM, Read


@dataclass(frozen=True)
class SoftmaxAttention(Leaf):
    """Softmax over the scores of a metric: the base class of `Softmax` and `Path`."""

    metric: ClassVar[Metric]

    causal: bool = options.flag(True)
    scale: float | None = options.positive_or_none()
    window: int | None = options.window_or_none()
    bias: bool = options.flag(False)
    forget: str = options.choice("none", "unscaled", "scaled")
    read: Read = options.one_of(MEAN, LOG_MEAN_EXP, MEAN_AND_LOG_SUM)
    softcap: float | None = options.positive_or_none()
    sink: bool = options.flag(False)
    distance: str = options.choice("none", "slopes", "buckets")
    buckets: int = options.count(BUCKETS, highest=MOST_BUCKETS)
    max_distance: int = options.count(LONGEST_OF_T5, highest=options.LONGEST)

    output = "b t h e"

    def check_together(self) -> None:
        if self.forget != "none" and not self.causal:
            raise ValueError(
                f"{self.name}: a forget gate decays from the key to the query, forward in time, "
                f"and needs causal=true; found forget={self.forget!r} and causal=false"
            )
        if self.sink and self.read == LOG_MEAN_EXP:
            raise ValueError(
                f"{self.name}: read=log_mean_exp needs weights that sum to one, and with sink=true "
                f"they sum to less"
            )
        check_distance(self)

    @cached_property
    def inputs(self) -> Inputs:
        bias: dict[str, str] = {"bias": "1|b 1|h t s"} if self.bias else {}
        gate: dict[str, str] = {"g": "b s h in (-inf, 0]"} if self.forget != "none" else {}
        sink: dict[str, str] = {"sink": "h"} if self.sink else {}
        added = distance_input(self)
        optional: dict[str, str | Pattern] = {**self.metric.inputs, **gate, **bias, **sink, **added}
        return Inputs(q="b t h d", k="b s n d", v="b s n e", **optional)

    @property
    def offers(self) -> Offers:
        return Offers(
            metric=self.metric,
            scale=self.scale,
            causal=self.causal,
            window=self.window,
            read=None if self.sink and self.read == MEAN else self.read.name,
            decay=None if self.forget == "none" else "head",
            sink=self.sink,
        )

    @property
    def reach(self) -> int | None:
        # A bias has a column for each position, and a transported key depends on all tokens.
        is_free = self.causal and self.metric is DOT and not self.bias
        return self.window - 1 if is_free and self.window is not None else None

    def meaning(self, name: str) -> object:
        return self.metric if name in self.metric.inputs else super().meaning(name)

    def refuses_mask(self, name: str) -> str | None:
        if self.metric is not DOT:
            return f"{self.name}'s scores depend on the tokens between the two of a pair"
        if name == "prefix" and self.forget != "none":
            return "a forget gate decays forward in time, and a query has no decay to later keys"
        return None

    @property
    def hides_later_keys(self) -> bool:
        return self.metric is DOT

    def with_read(self, read: Read) -> SoftmaxAttention:
        return replace(self, read=read)

    def flops(self, sizes: Mapping[str, int]) -> Flops | None:
        t, s = sizes["t"], sizes["s"]
        pairs = visible_pairs(t, s, causal=self.causal, window=self.window)
        keys = visible_keys(s, self.window)
        return self.metric.flops(pairs, keys, sizes["d"], sizes["e"]).times(sizes["h"])

    def _extra(self, x: ByName, heads: int) -> Arrays:
        """The metric's own inputs, repeated to `heads` heads."""
        names = self.metric.inputs
        return {n: repeat_heads(swap_time_and_heads(x[n]), heads) for n in names}

    def _gate_scale(self, d: int) -> float:
        """The factor of the decay of the forget gate."""
        return self.scale_for(d) if self.forget == "scaled" else 1.0

    def _logits(self, x: ByName, frame: Frame, past: ByName | None = None) -> Array:
        """The scores s ⟨q, k⟩; with cached keys, those of new queries against all keys."""
        q, k = swap_time_and_heads(x["q"]), swap_time_and_heads(x["k"])
        h, d = q.shape[1], q.shape[3]
        scores = self.metric.scores(q, repeat_heads(k, h), self._extra(x, h), frame, past)
        return self.scale_for(d) * scores

    def _log_weights(
        self, x: ByName, frame: Frame, logits: Array, decay: Array | None, bias: Array | None
    ) -> tuple[Array, Array]:
        """log A (b, h, t, s) and λ (b, h, t, 1)."""
        scores = logits if self.softcap is None else capped(logits, self.softcap)
        if decay is not None:
            scores = scores + self._gate_scale(x["q"].shape[3]) * decay
        if bias is not None:
            scores = scores + bias
        if self.distance != "none":
            scores = scores + distance_scores(self, x, frame)
        scores = mask_scores(frame.visible(causal=self.causal, window=self.window), scores)
        return log_softmax(scores, x["sink"][None, :, None, None] if self.sink else None)

    def _full_log_weights(self, x: ByName, frame: Frame, logits: Array) -> tuple[Array, Array]:
        """log A and λ of a full call."""
        is_gated, t = self.forget != "none", x["q"].shape[1]
        decay = forget_gate.decay(x["g"], t) if is_gated else None
        return self._log_weights(x, frame, logits, decay, x["bias"] if self.bias else None)

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        v = repeat_heads(swap_time_and_heads(x["v"]), x["q"].shape[2])
        o = self.read.forward(*self._full_log_weights(x, frame, self._logits(x, frame)), v)
        return swap_time_and_heads(o), ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        q, k, v = (swap_time_and_heads(x[name]) for name in ("q", "k", "v"))
        h, n, d = q.shape[1], k.shape[1], q.shape[3]
        o, d_o = swap_time_and_heads(out), swap_time_and_heads(cotangent)
        logits = self._logits(x, frame)
        log_weights, log_total = self._full_log_weights(x, frame, logits)
        d_scores, d_v = self.read.backward(log_weights, repeat_heads(v, h), o, d_o)
        d_logits = d_scores
        if self.softcap is not None:
            d_logits = d_scores * slope(logits, self.softcap)
        d_q, d_k, d_extra = self.metric.vjp(
            q, repeat_heads(k, h), self._extra(x, h), frame, self.scale_for(d) * d_logits
        )
        gradients = input_gradients(d_q, d_k, d_v, n)
        for name, d_input in d_extra.items():
            gradients[name] = swap_time_and_heads(sum_heads(d_input, n))
        if self.forget != "none":
            gradients["g"] = forget_gate.decay_vjp(self._gate_scale(d) * d_scores)
        if self.bias:
            gradients["bias"] = sum_to(d_scores, x["bias"].shape)
        if self.distance != "none":
            gradients |= distance_vjp(self, x, frame, d_scores)
        if self.sink:
            gradients["sink"] = sink_vjp(x["sink"], log_total, self.read.d_log_total(o, d_o))
        return gradients

    def slots(self) -> tuple[Slot, ...]:
        gate = () if self.forget == "none" else (forget_gate.SLOT,)
        return (*self.metric.slots(), Slot("value", "{v}", "b c n e"), *gate)

    def step(self, past: ByName, x: ByName, frame: Frame) -> tuple[Array, Updates]:
        xp, k, h = namespace(x["q"]), swap_time_and_heads(x["k"]), x["q"].shape[2]
        past_keys = cached_keys(self.metric, past)
        updates = self.metric.advance(past_keys, k, self._extra(x, k.shape[1]), frame)
        repeated = {name: repeat_heads(buffer, h) for name, buffer in past_keys.items()}
        logits = self._logits(x, frame, repeated)
        decay, bias = None, bias_of_keys(x["bias"], frame) if self.bias else None
        if self.forget != "none":
            decay, updates["decay"] = forget_gate.extended_decay(past["decay"], x["g"])
        values = swap_time_and_heads(xp.concat([past["value"], x["v"]], axis=1))
        log_weights = self._log_weights(x, frame, logits, decay, bias)
        o = self.read.forward(*log_weights, repeat_heads(values, h))
        return swap_time_and_heads(o), {**updates, "value": Append(x["v"])}


def capped(scores: Array, cap: float) -> Array:
    """c tanh(S / c)."""
    return cap * namespace(scores).tanh(scores / cap)


def slope(scores: Array, cap: float) -> Array:
    """The derivative 1 − tanh²(S / c) at the scores before the cap."""
    bounded = namespace(scores).tanh(scores / cap)
    return (1.0 - bounded) * (1.0 + bounded)


def sink_vjp(sink: Array, log_total: Array, d_log_total: Array) -> Array:
    """dσ (h,) from λ (b, h, t, 1) and the cotangent of λ through all of its uses."""
    xp = namespace(log_total)
    weight = xp.exp(sink[None, :, None, None] - log_total)
    return xp.sum(weight * d_log_total, axis=(0, 2, 3))


def bias_of_keys(bias: Array, frame: Frame) -> Array:
    """Columns of bias (b or 1, h or 1, t, capacity) at the positions of the frame's keys (b, s)."""
    xp = namespace(bias)
    b = frame.k_position.shape[0]
    column = xp.clip(frame.k_position, max=bias.shape[3] - 1)
    bias = xp.broadcast_to(bias, (b, *bias.shape[1:]))
    return xp.take_along_axis(bias, as_index(column)[:, None, None, :], axis=3)


@dataclass(frozen=True)
class Softmax(SoftmaxAttention):
    """Softmax attention: o = softmax(s q kᵀ + bias + mask) v.

    Query i of t has position i + s − t among the keys. With fewer key/value heads than query heads
    (n < h), query head i reads key/value head ⌊i n / h⌋.

    Source: Vaswani et al. 2017, Eq. 1; LASER (arXiv 2411.03493) Eq. 2; ALiBi (arXiv 2108.12409) 3;
    T5 (arXiv 1910.10683) 2.1.

    Parameters
    ----------
    causal : bool
        Whether a query attends only to keys at its own position and before.
    scale : float, optional
        The factor s of the logits; d^{-1/2} by default.
    window : int, optional
        The query at position i attends to keys at positions j with |i − j| < window. A value above
        2^30 means no window, because no sequence is longer.
    bias : bool
        Whether there is an input `bias` (b or 1, h or 1, t, s), added to the scaled logits. Its
        entries are finite, or −∞ to mask a pair in softmax (preconditioners do not use the bias).
        In `extend` its last axis is the cache's capacity: column j is the key at position j.
    forget : {"none", "unscaled", "scaled"}
        Whether there is an input `g` (b, s, h) ≤ 0 and finite, the logarithm of a forget gate:
        the sum of g over the tokens after the key up to the query is added to the logits
        ("unscaled"), or to the scores before they are multiplied by s ("scaled"). Causal only.
    read : Mean, LogMeanExp or MeanAndLogSum
        How the weights are applied to the values. `Laser` and `with_lse` set it.
    softcap : float, optional
        The cap c of soft-capped logits c tanh(s q·k / c), to which a decay or a bias is then added.
    sink : bool
        Whether there is an input `sink` (h,), the logit of an attention sink for each query head:
        one more column in the softmax's denominator, without a value.
    distance : {"none", "slopes", "buckets"}
        Whether there is an input `slopes` (h,) ≥ 0, with which m |i − j| is subtracted from the
        scores (ALiBi), or an input `bucket_table` (buckets, h), whose row for the distance j − i
        is added (T5). It is added in the same place as a bias, and needs no array of pairs.
    buckets : int
        The number of rows of `bucket_table`; without causality half are for keys after the query.
    max_distance : int
        The distance from which on all keys are in the last bucket.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> rng = np.random.default_rng(0)
    >>> q = rng.normal(size=(2, 5, 8, 16))
    >>> k, v = rng.normal(size=(2, 2, 5, 4, 16))
    >>> pa.Softmax()(q, k, v).shape
    (2, 5, 8, 16)
    """

    name: ClassVar[str] = "softmax"
    variants: ClassVar[tuple[str, ...]] = (
        "softmax[causal=false]",
        "softmax[scale=0.3]",
        "softmax[window=3]",
        "softmax[causal=false,window=3]",
        "softmax[bias=true]",
        "softmax[forget=unscaled]",
        "softmax[softcap=2]",
        "softmax[sink=true]",
        "softmax[distance=slopes]",
        "softmax[distance=buckets]",
        "softmax[causal=false,distance=buckets,buckets=9,max_distance=20]",
        "softmax[read=mean_and_log_sum]",
    )
    metric: ClassVar[Metric] = DOT
