"""Faults of softmax attention, of its reads, and of CCQ's covariance by the query."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from precondattn.arrays import namespace
from precondattn.spec import query_weighted, soft_cap, softmax
from precondattn.spec.array_functions import (
    row_sum,
    sum_heads,
    swap_time_and_heads,
    transpose,
)
from precondattn.spec.l2_norm import l2_norm_vjp
from precondattn.spec.laser import LogMeanExp
from precondattn.spec.read import Mean, MeanAndLogSum
from precondattn.spec.softmax import SoftmaxAttention
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    Call,
    Fault,
    inside,
    with_call,
)
from precondattn_conformance.faults.options import with_option
from precondattn_conformance.faults.tokens import rolled
from precondattn_conformance.faults.written_by_hand.written import written

BOTH = (FORWARD, BACKWARD)


def faults() -> list[Fault]:
    """All faults in this file."""
    return [*_of_softmax(), *_of_caps_and_sinks(), *_of_reads(), *_of_query_weighted()]


def _of_softmax() -> list[Fault]:
    return [
        written(
            "softmax",
            (*BOTH, STEP),
            "no maximum subtracted before the exponential",
            inside(softmax, "log_softmax", lambda _: _unshifted),
        ),
        written(
            "softmax",
            STEP,
            "no maximum subtracted before the exponential of a step",
            inside(softmax, "log_softmax", lambda _: _unshifted),
        ),
        written(
            "softmax",
            (FORWARD, STEP),
            "masked pairs at -1e9: a query without keys reads the mean",
            inside(softmax, "mask_scores", lambda _: _finite_mask),
        ),
        written(
            "softmax",
            BACKWARD,
            "the gradients of a group's heads averaged",
            inside(softmax, "sum_heads", lambda _: _mean_of_heads),
        ),
        written(
            "softmax",
            BACKWARD,
            "the gradient of the scores without the scale",
            inside(SoftmaxAttention, "backward", lambda true: _unscaled(true)),
        ),
        written(
            "softmax[bias=true]", (FORWARD, STEP), "the bias scaled too", with_call(_scaled_bias)
        ),
        written(
            "softmax[bias=true]",
            STEP,
            "the bias of the column before",
            inside(softmax, "bias_of_keys", lambda true: lambda *a: rolled(true(*a), 1, axis=3)),
        ),
        written(
            "softmax[bias=true]",
            BACKWARD,
            "the gradient of a shared bias from one head only",
            inside(softmax, "sum_to", lambda _: _first_to),
        ),
        written(
            "softmax",
            (FORWARD, BACKWARD),
            "the segments of the first keys in place of those of the queries",
            with_call(_with_segments_of_first_keys),
        ),
        written(
            "softmax",
            FORWARD,
            "keys more than 128 tokens back masked",
            with_option("window", lambda _: 129),
        ),
        written(
            "softmax[bias=true]",
            (FORWARD, STEP),
            "a bias of -inf replaced by -1e9",
            with_call(lambda call: call.given(bias=call.inputs["bias"].clip(-1e9))),
        ),
        written(
            "softmax",
            STEP,
            "new tokens do not attend to one another",
            with_call(_without_new_keys),
        ),
    ]


def _of_caps_and_sinks() -> list[Fault]:
    return [
        written(
            "softmax[softcap=2]",
            BACKWARD,
            "the slope of the cap left out",
            inside(soft_cap, "slope", lambda _: lambda scores, cap: 1.0),
        ),
        written(
            "softmax[softcap=2]",
            (FORWARD, STEP),
            "no cap",
            inside(soft_cap, "capped", lambda _: lambda scores, cap: scores),
        ),
        written(
            "softmax[sink=true]",
            (*BOTH, STEP),
            "the sink of the head before",
            inside(softmax, "column", lambda true: lambda sink: rolled(true(sink), 1, axis=0)),
        ),
        written(
            "softmax[sink=true]",
            BACKWARD,
            "the gradient of the sink with the other sign",
            inside(softmax, "sink_vjp", lambda true: lambda *a: -true(*a)),
        ),
        written(
            "softmax[read=mean_and_log_sum]",
            BACKWARD,
            "the cotangent of the log-sum-exp left out",
            inside(MeanAndLogSum, "d_log_total", lambda _: _of_mean_alone),
        ),
    ]


def _of_mean_alone(self: Any, o: Any, d_o: Any) -> Any:
    return -row_sum(o[..., :-1] * d_o[..., :-1])


def _unshifted(x: Any, more: Any = None) -> Any:
    xp = namespace(x)
    total = row_sum(xp.exp(x)) + (0.0 if more is None else xp.exp(more))
    log_total = xp.log(xp.where(total > 0, total, 1.0))
    return x - log_total, log_total


def _finite_mask(visible: Any, scores: Any) -> Any:
    return namespace(scores).where(visible, scores, -1e9)


def _mean_of_heads(x: Any, heads: int) -> Any:
    return sum_heads(x, heads) * (heads / x.shape[1])


def _unscaled(true: Any) -> Any:
    def backward(self: Any, x: Any, *rest: Any) -> Any:
        gradients = true(self, x, *rest)
        scale = self.scale_for(x["q"].shape[3])
        return {**gradients, "q": gradients["q"] / scale, "k": gradients["k"] / scale}

    return backward


def _scaled_bias(call: Call) -> Call:
    return call.given(
        bias=call.inputs["bias"] * call.mechanism.scale_for(call.inputs["q"].shape[3])
    )


def _first_to(x: Any, shape: tuple[int, ...]) -> Any:
    for axis, (wide, narrow) in enumerate(zip(x.shape, shape, strict=True)):
        if wide != narrow:
            x = x[(slice(None),) * axis + (slice(0, 1),)]
    return x


def _with_segments_of_first_keys(call: Call) -> Call:
    frame = call.frame
    if frame.k_segment is None:
        return call
    first = frame.k_segment[:, : frame.q_position.shape[1]]
    return replace(call, frame=frame.replaced(q_segment=first))


def _without_new_keys(call: Call) -> Call:
    """New tokens do not attend to one another, only to themselves."""
    frame = call.frame
    t = frame.q_position.shape[1]
    later = namespace(frame.q_position).arange(t)[None, :] * 1_000_000
    position = namespace(later).concat([frame.k_position[:, :-t], frame.q_position + later], axis=1)
    return replace(call, frame=frame.replaced(k_position=position))


def _of_reads() -> list[Fault]:
    return [
        written(
            "softmax",
            BACKWARD,
            "the row sum left out of dS",
            inside(Mean, "backward", lambda _: _without_row_sum),
        ),
        written(
            "laser",
            BACKWARD,
            "dO·O in place of the sum of dO",
            inside(LogMeanExp, "backward", lambda _: _laser_as_mean),
            subject="softmax",
        ),
        written(
            "laser",
            BACKWARD,
            "the prior's weights in place of the posterior's",
            inside(LogMeanExp, "backward", lambda _: _laser_of_prior),
            subject="softmax",
        ),
        written(
            "laser",
            (*BOTH, STEP),
            "one shift for all tokens, future ones included",
            inside(LogMeanExp, "forward", lambda _: _laser_of_one_shift),
            subject="softmax",
        ),
        written(
            "laser",
            (FORWARD, STEP),
            "the mean in place of its logarithm",
            inside(LogMeanExp, "forward", lambda _: Mean.forward),
            subject="softmax",
        ),
        written(
            "laser",
            (FORWARD, STEP),
            "the mean of values clipped to ±2",
            inside(
                LogMeanExp,
                "forward",
                lambda true: lambda self, a, total, v: true(self, a, total, v.clip(-2, 2)),
            ),
            subject="softmax",
        ),
    ]


def _without_row_sum(self: Any, log_weights: Any, v: Any, o: Any, d_o: Any) -> Any:
    weights = namespace(v).exp(log_weights)
    return weights * (d_o @ transpose(v)), transpose(weights) @ d_o


def _posterior(log_weights: Any, v: Any, o: Any) -> Any:
    xp = namespace(v)
    return xp.exp(log_weights[..., None] + v[:, :, None, :, :] - o[:, :, :, None, :])


def _laser_as_mean(self: Any, log_weights: Any, v: Any, o: Any, d_o: Any) -> Any:
    xp = namespace(v)
    weighted = d_o[:, :, :, None, :] * _posterior(log_weights, v, o)
    d_scores = xp.sum(weighted, axis=-1) - xp.exp(log_weights) * row_sum(d_o * o)
    return d_scores, xp.sum(weighted, axis=2)


def _laser_of_prior(self: Any, log_weights: Any, v: Any, o: Any, d_o: Any) -> Any:
    xp = namespace(v)
    weighted = d_o[:, :, :, None, :] * _posterior(log_weights, v, o)
    d_scores = xp.sum(weighted, axis=-1) - xp.exp(log_weights) * row_sum(d_o)
    return d_scores, transpose(xp.exp(log_weights)) @ d_o


def _laser_of_one_shift(self: Any, log_weights: Any, log_total: Any, v: Any) -> Any:
    xp = namespace(v)
    shift = xp.max(v, axis=2, keepdims=True)
    mean = xp.exp(log_weights) @ xp.exp(v - shift)
    some = xp.max(log_weights, axis=-1, keepdims=True) > -xp.inf
    return xp.where(some, shift + xp.log(xp.where(some, mean, 1.0)), 0.0)


def _of_query_weighted() -> list[Fault]:
    name = "query_weighted_query"
    return [
        written(
            name,
            (FORWARD, STEP),
            "the second moment in place of the covariance",
            inside(query_weighted, "row_sum", lambda true: lambda x: 0 * true(x)),
        ),
        written(
            name,
            BACKWARD,
            "the weights constant to the gradient",
            inside(query_weighted.QueryWeightedQuery, "backward", lambda _: _of_constant_weights),
        ),
        written(
            name,
            (FORWARD, STEP),
            "the keys not normalised to length 1",
            inside(query_weighted, "l2_norm", lambda true: _queries_only(true)),
        ),
    ]


def _queries_only(true: Any) -> Any:
    calls: list[int] = []

    def l2_norm(x: Any, eps: float) -> Any:
        calls.append(1)
        return true(x, eps) if len(calls) % 2 else x  # First of the queries, then of the keys.

    return l2_norm


def _of_constant_weights(
    self: Any, x: Any, frame: Any, out: Any, residuals: Any, cotangent: Any
) -> Any:
    """ds = p ∘ ũ, without the gradient through p."""
    terms = self._terms(x, x["k"], frame)
    g = swap_time_and_heads(cotangent)
    h = -terms.contraction * g
    u = h @ transpose(terms.k)
    d_s = terms.p * (u - row_sum(terms.p * u))
    d_k = transpose(terms.p * terms.centred) @ h + transpose(d_s) @ terms.q
    d_k = swap_time_and_heads(sum_heads(d_k, x["k"].shape[2]))
    return {
        "q": l2_norm_vjp(x["q"], self.eps, swap_time_and_heads(g + d_s @ terms.k)),
        "k": l2_norm_vjp(x["k"], self.eps, d_k),
        "contraction": swap_time_and_heads(-row_sum(g * terms.c))[..., 0],
    }
