"""Faults of leaves with several recurrences: gated slots, and CCQ's covariance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from precondattn.arrays import namespace
from precondattn.spec import conditioned_query, gsa
from precondattn.spec.array_functions import row_sum
from precondattn.spec.conditioned_query import ConditionedQuery
from precondattn.spec.gsa import GSA
from precondattn.spec.recurrence import TokenByToken
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    STEP_BACKWARD,
    Fault,
    inside,
    with_output,
)
from precondattn_conformance.faults.written_by_hand.written import written

RUN = (FORWARD, STEP)

PULL = (BACKWARD, STEP_BACKWARD)

CCQ = "conditioned_query"


def faults() -> list[Fault]:
    """All faults in this file."""
    return [*_of_gsa(), *_of_ccq()]


def _of_gsa() -> list[Fault]:
    return [
        written(
            "gsa",
            PULL,
            "the row sum left out of the softmax's gradient",
            inside(gsa, "row_sum", lambda true: lambda x: 0 * true(x)),
        ),
        written(
            "gsa",
            RUN,
            "the second memory does not decay",
            inside(
                GSA, "_streams", lambda true: _with_second(true, lambda x: x._replace(g=0 * x.g))
            ),
        ),
        written(
            "gsa",
            RUN,
            "every slot is written the whole value",
            inside(
                GSA,
                "_streams",
                lambda true: _with_second(true, lambda x: x._replace(k=x.k * 0 + 1)),
            ),
        ),
        written(
            "gsa",
            RUN,
            "the slots' weights not normalised",
            inside(gsa, "softmax", lambda _: lambda x: namespace(x).exp(x)),
        ),
        written(
            "gsa",
            PULL,
            "the gradient of s from the first memory only",
            inside(TokenByToken, "vjp", lambda true: _without_first_keys(true)),
        ),
    ]


def _with_second(true: Any, change: Any) -> Any:
    def _streams(self: Any, *rest: Any) -> Any:
        first, second, last = true(self, *rest)
        return first, change(second), last

    return _streams


def _without_first_keys(true: Any) -> Any:
    """In the second memory, whose gradient is computed first, the weights are the keys."""
    calls: list[int] = []

    def vjp(*given: Any) -> Any:
        d = true(*given)
        calls.append(1)
        if len(calls) > 1:
            return d
        return d._replace(stream=d.stream._replace(k=0 * d.stream.k))

    return vjp


def _of_ccq() -> list[Fault]:
    return [
        written(
            CCQ,
            RUN,
            "the second moment in place of the covariance",
            inside(conditioned_query, "contracted", lambda _: _by_second_moment),
        ),
        written(
            CCQ,
            RUN,
            "n − 1 in place of n",
            inside(conditioned_query, "contracted", lambda true: _unbiased(true)),
        ),
        written(
            CCQ,
            RUN,
            "normalised to length 1 again",
            with_output(lambda o: o / namespace(o).sqrt(row_sum(o * o) + 1e-6)),
        ),
        written(
            CCQ,
            RUN,
            "the keys not normalised to length 1",
            inside(ConditionedQuery, "_normalized", lambda true: _of_queries_only(true)),
        ),
        written(
            "conditioned_query[decay=head]",
            RUN,
            "the count does not decay",
            inside(ConditionedQuery, "_streams", lambda true: _count_all(true)),
        ),
        written(
            "conditioned_query[decay=head]",
            PULL,
            "the count constant to the gradient",
            inside(conditioned_query, "_contracted_vjp", lambda true: _of_constant_count(true)),
        ),
        written(
            "conditioned_query[decay=channel]",
            RUN,
            "the decay of the first channel in place of the mean",
            inside(ConditionedQuery, "log_decay", lambda true: _of_first_channel(true)),
        ),
        written(
            CCQ,
            PULL,
            "the mean constant to the gradient",
            inside(conditioned_query, "_contracted_vjp", lambda true: _of_constant_mean(true)),
        ),
        written(
            CCQ,
            STEP,
            "the count reset at every step",
            _with_count_forgotten,
        ),
        written(
            CCQ,
            (FORWARD, BACKWARD),
            "masked keys are counted",
            inside(conditioned_query, "where_valid", lambda _: lambda x, frame: x),
        ),
    ]


def _by_second_moment(a: Any, total: Any, n: Any, q: Any, contraction: Any) -> Any:
    return (q - contraction / conditioned_query._positive(n) * a,)


def _unbiased(true: Any) -> Any:
    def contracted(a: Any, total: Any, n: Any, q: Any, contraction: Any) -> Any:
        fewer = namespace(n).where(n > 1, n - 1, 1.0)
        (out,) = true(a, total, n, q, contraction)
        return (q - (q - out) * n / fewer,)

    return contracted


def _of_queries_only(true: Any) -> Any:
    calls: list[int] = []

    def normalized(self: Any, x: Any, form: Any) -> Any:
        calls.append(1)
        return true(self, x, form) if len(calls) % 2 == 0 else x  # The keys come first.

    return normalized


def _count_all(true: Any) -> Any:
    def _streams(self: Any, *rest: Any) -> Any:
        second, first, (count, state) = true(self, *rest)
        return [second, first, (count._replace(g=0 * count.g), state)]

    return _streams


def _of_constant_count(true: Any) -> Any:
    def vjp(*given: Any) -> Any:
        *others, d_n = true(*given)
        return (*others, 0 * d_n)

    return vjp


def _of_constant_mean(true: Any) -> Any:
    def vjp(*given: Any) -> Any:
        *others, d_total, d_n = true(*given)
        return (*others, 0 * d_total, d_n)

    return vjp


def _of_first_channel(true: Any) -> Any:
    def log_decay(self: Any, x: Any, frame: Any) -> Any:
        return true(self, {**x, "g": x["g"][..., :1]}, frame)

    return log_decay


def _with_count_forgotten(truth: Any, call: Any) -> Any:
    return truth(replace(call, past={**call.past, "count": 0 * call.past["count"]}))
