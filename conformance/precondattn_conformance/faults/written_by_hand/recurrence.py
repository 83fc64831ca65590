"""Faults of the recurrences: linear attention, its variants, and the delta rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from precondattn.arrays import namespace
from precondattn.spec import (
    delta_product,
    dplr,
    linear,
    linear_family,
    recurrence,
    retention,
    several_steps,
)
from precondattn.spec.array_functions import previous_token, transpose
from precondattn.spec.linear import Linear
from precondattn.spec.preconditioned_key import PreconditionedKey
from precondattn.spec.recurrence import TokenByToken
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    STEP_BACKWARD,
    Call,
    Fault,
    Result,
    Truth,
    inside,
)
from precondattn_conformance.faults.written_by_hand.written import written

RUN = (FORWARD, STEP)

PULL = (BACKWARD, STEP_BACKWARD)


def faults() -> list[Fault]:
    """All faults in this file."""
    return [*_of_the_recurrence(), *_of_its_gradient(), *_of_options()]


def _of_the_recurrence() -> list[Fault]:
    return [
        written(
            "gla",
            RUN,
            "the state decays after the write",
            inside(recurrence, "_add", lambda _: _decaying_behind),
        ),
        written(
            "ssd",
            RUN,
            "the state is read before the write",
            inside(recurrence, "_add_and_read", lambda _: _reading_before),
        ),
        written(
            "gated_delta",
            RUN,
            "corrected by the state before its decay",
            inside(recurrence, "_correct", lambda _: _correcting_undecayed),
        ),
        written(
            "gated_delta",
            RUN,
            "the correction not multiplied by β",
            inside(recurrence, "_correct", lambda _: _correcting_fully),
        ),
        written(
            "kda",
            RUN,
            "corrected by the state before its decay",
            inside(recurrence, "_correct", lambda _: _correcting_undecayed),
        ),
        written(
            "comba",
            RUN,
            "corrected by the state after its decay",
            inside(recurrence, "_correct_undecayed", lambda _: recurrence._correct),
        ),
        written(
            "comba[erases=decayed]",
            RUN,
            "the key that is written is erased",
            inside(recurrence, "_correct", lambda true: _erasing_what_is_written(true)),
        ),
        written(
            "gdn2",
            RUN,
            "the key that is written is erased",
            inside(recurrence, "_correct", lambda true: _erasing_what_is_written(true)),
        ),
        written(
            "preconditioned_key",
            RUN,
            "the squares of a key counted after it is written",
            inside(PreconditionedKey, "_stream", lambda true: _of_the_token_before(true)),
        ),
        written(
            "preconditioned_key",
            RUN,
            "the weight of a key ignored",
            inside(PreconditionedKey, "_stream", lambda true: _of_equal_weights(true)),
        ),
        written(
            "erasing_kda",
            RUN,
            "the key that is written is erased",
            inside(recurrence, "_correct", lambda true: _erasing_what_is_written(true)),
        ),
        written(
            "delta_product",
            RUN,
            "queries read after the first step",
            inside(delta_product, "at_last", lambda _: several_steps.at_first),
        ),
        written(
            "delta_product",
            RUN,
            "the state decays before the last step",
            inside(delta_product, "at_first", lambda _: several_steps.at_last),
        ),
        written(
            "dplr",
            RUN,
            "what is read is added to the value that k writes",
            inside(dplr, "at_first", lambda _: several_steps.at_last),
        ),
        written(
            "delta",
            RUN,
            "added without correction",
            inside(recurrence, "_correct", lambda _: _only_adding),
        ),
        written(
            "delta",
            RUN,
            "read with the key in place of the query",
            inside(recurrence, "_correct_and_read", lambda true: _reading_with_key(true)),
        ),
        written(
            "linear",
            FORWARD,
            "the state not carried beyond 128 tokens",
            _with_resets,
        ),
        written(
            "linear",
            STEP,
            "the state before the last token kept",
            inside(TokenByToken, "forward", lambda true: _stopping_early(true)),
        ),
    ]


def _decaying_behind(state: Any, token: Any) -> Any:
    k, v, g = token
    return namespace(k).exp(g) * (state + recurrence._outer(k, v)), state


def _reading_before(state: Any, token: Any) -> Any:
    q, *write = token
    after, before = recurrence._add(state, tuple(write))
    return after, q @ before


def _correcting_undecayed(state: Any, token: Any) -> Any:
    k, v, g, beta, _ = token
    decayed = namespace(k).exp(g) * state
    u = beta[..., None] * (v - recurrence._read(state, k))
    return decayed + recurrence._outer(k, u), state


def _erasing_what_is_written(true: Any) -> Any:
    return lambda state, token: true(state, (*token[:-1], token[0]))


def _of_the_token_before(true: Any) -> Any:
    def stream(self: Any, x: Any, frame: Any) -> Any:
        result = true(self, x, frame)
        return result._replace(v=previous_token(result.v))

    return stream


def _of_equal_weights(true: Any) -> Any:
    return lambda self, x, frame: true(self, x | {"beta_atk": 0 * x["beta_atk"] + 1}, frame)


def _correcting_fully(state: Any, token: Any) -> Any:
    k, v, g, beta, _ = token
    decayed = namespace(k).exp(g) * state
    u = beta[..., None] * v - recurrence._read(decayed, k)
    return decayed + recurrence._outer(k, u), state


def _only_adding(state: Any, token: Any) -> Any:
    k, v, g, beta, _ = token
    return namespace(k).exp(g) * state + recurrence._outer(k, beta[..., None] * v), state


def _reading_with_key(true: Any) -> Any:
    def read(state: Any, token: Any) -> Any:
        state, o = true(state, token)
        return state, o * 0 + recurrence._read(state, token[1])[..., None, :]

    return read


def _with_resets(truth: Truth, call: Call) -> Result:
    """The state is reset every 128 tokens."""
    t = call.inputs["q"].shape[1]
    if t <= 128 or call.frame.k_segment is not None:
        return truth(call)
    outs = []
    for i in range(0, t, 128):
        part = {name: x[:, i : i + 128] for name, x in call.inputs.items()}
        outs.append(truth(replace(call, inputs=part)).out)
    return Result(namespace(outs[0]).concat(outs, axis=1))


def _stopping_early(true: Any) -> Any:
    def forward(x: Any, state: Any) -> Any:
        o, _ = true(x, state)
        if x.k.shape[2] == 1:
            return o, state
        fewer = x._replace(**{n: a if a is None else a[:, :, :-1] for n, a in x._asdict().items()})
        return o, true(fewer, state)[1]

    return forward


def _of_its_gradient() -> list[Fault]:
    return [
        written(
            "linear",
            PULL,
            "the gradient of a state carried back by one token only",
            inside(recurrence, "_back_from_addition", lambda _: _forgetful_back),
        ),
        written(
            "gated_delta",
            PULL,
            "the correction constant to the gradient",
            inside(recurrence, "_back_from_correction", lambda _: _back_as_from_addition),
        ),
        written(
            "kda",
            PULL,
            "the correction constant to the gradient",
            inside(recurrence, "_back_from_correction", lambda _: _back_as_from_addition),
        ),
        written(
            "comba",
            PULL,
            "the correction decayed in the gradient",
            inside(recurrence, "_back_from_undecayed", lambda _: recurrence._back_from_correction),
        ),
        written(
            "gdn2",
            PULL,
            "the correction constant to the gradient",
            inside(recurrence, "_back_from_correction", lambda _: _back_as_from_addition),
        ),
        written(
            "delta_product",
            PULL,
            "the gates' gradient from the last step",
            inside(delta_product, "of_first", lambda _: several_steps.of_last),
        ),
        written(
            "dplr",
            PULL,
            "the gradients of the two steps exchanged",
            inside(dplr, "of_first", lambda _: several_steps.of_last),
        ),
        written(
            "kda",
            PULL,
            "one gate's gradient for all key channels",
            inside(TokenByToken, "vjp", lambda true: _mean_of_gates(true)),
        ),
        written(
            "gla",
            PULL,
            "the gates' gradient from the state before the decay",
            inside(TokenByToken, "vjp", lambda true: _gates_of_undecayed(true)),
        ),
        written(
            "ssd",
            PULL,
            "the queries' gradient from the state before the write",
            inside(TokenByToken, "vjp", lambda true: _queries_of_state_before(true)),
        ),
        written(
            "retention",
            PULL,
            "the gradient of a state decays twice with every token",
            inside(recurrence, "_back_from_addition", lambda true: _decaying_twice(true)),
        ),
    ]


def _forgetful_back(d_state: Any, token: Any) -> Any:
    q, d_o, _, g = token
    here = transpose(q) @ d_o
    return namespace(q).exp(g) * here, d_state + here


def _back_as_from_addition(d_state: Any, token: Any) -> Any:
    q, d_o, _, g, *_ = token
    d_state = d_state + transpose(q) @ d_o
    return namespace(q).exp(g) * d_state, d_state


def _decaying_twice(true: Any) -> Any:
    def back(d_state: Any, token: Any) -> Any:
        before, here = true(d_state, token)
        return namespace(before).exp(token[3]) * before, here

    return back


def _gates_of_undecayed(true: Any) -> Any:
    def vjp(x: Any, *rest: Any) -> Any:
        d = true(x, *rest)
        return d._replace(
            stream=d.stream._replace(g=d.stream.g * namespace(x.g).exp(-x.g.clip(-50)))
        )

    return vjp


def _mean_of_gates(true: Any) -> Any:
    def vjp(x: Any, *rest: Any) -> Any:
        d = true(x, *rest)
        g = 0 * d.stream.g + d.stream.g.mean(axis=3, keepdims=True)
        return d._replace(stream=d.stream._replace(g=g))

    return vjp


def _queries_of_state_before(true: Any) -> Any:
    def vjp(x: Any, state: Any, d_o: Any, d_final: Any) -> Any:
        d = true(x, state, d_o, d_final)
        t = x.q.shape[2]
        written_and_read = (d_o * x.v[:, :, -t:, None, :]).sum(axis=-1, keepdims=True)
        d_q = d.stream.q - written_and_read * x.k[:, :, -t:, None, :]
        return d._replace(stream=d.stream._replace(q=d_q))

    return vjp


def _of_options() -> list[Fault]:
    return [
        written(
            "retention",
            RUN,
            "the decay of the next head",
            inside(
                retention,
                "log_retention",
                lambda true: lambda heads, like: true(heads + 1, like)[1:],
            ),
        ),
        written(
            "retention",
            RUN,
            "the decay of the key's head in place of the query's",
            inside(retention, "log_retention", lambda true: _of_key_heads(true)),
        ),
        written(
            "linear",
            (FORWARD, BACKWARD),
            "the state not reset at the first token of a segment",
            inside(linear_family, "forget_other_segments", lambda _: lambda g, frame: g),
        ),
        written(
            "elu1(linear[normalize=true])",
            STEP,
            "the sum of weights reset at every step",
            inside(Linear, "_with_mass", lambda true: _without_mass(true)),
            subject="linear",
        ),
        written(
            "elu1(linear[normalize=true])",
            FORWARD,
            "divided by the sum without the current token",
            inside(Linear, "_sum_of_weights", lambda true: lambda self, m: true(self, _earlier(m))),
            subject="linear",
        ),
        written(
            "elu1(linear[normalize=true])",
            PULL,
            "the sum of weights constant to the gradient",
            inside(linear, "row_sum", lambda true: lambda x: 0 * true(x)),
            subject="linear",
        ),
        written(
            "elu1(linear[normalize=true])",
            (FORWARD, STEP),
            "the features of a padded key are written",
            inside(linear_family, "where_valid", lambda _: lambda x, frame: x),
            subject="linear",
        ),
        written(
            "delta",
            (BACKWARD, STEP_BACKWARD),
            "the gradients of value heads averaged over their key head",
            inside(linear_family, "sum_heads", lambda true: _mean_of_heads(true)),
        ),
    ]


def _of_key_heads(true: Any) -> Any:
    def log_retention(heads: int, like: Any) -> Any:
        return namespace(like).repeat(true((heads + 1) // 2, like), 2)[:heads]

    return log_retention


def _without_mass(true: Any) -> Any:
    def _with_mass(self: Any, state: Any) -> Any:
        return true(self, {**state, "mass": 0 * state["mass"]})

    return _with_mass


def _earlier(mass: Any) -> Any:
    """The sums (b, t, h, 1) of the preceding token; the first token keeps its own."""
    return namespace(mass).concat([mass[:, :1], mass[:, :-1]], axis=1)


def _mean_of_heads(true: Any) -> Any:
    return lambda x, heads: true(x, heads) * (heads / x.shape[1])
