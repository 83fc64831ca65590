"""Faults of leaves that sum over all tokens of a sequence: channels and landmarks."""

from __future__ import annotations

from typing import Any

from precondattn.arrays import namespace
from precondattn.spec import (
    cross_covariance,
    iterated_inverse,
    l2_norm,
    nystrom,
    segment_means,
    token_convolution,
)
from precondattn_conformance.faults.fault import BACKWARD, FORWARD, Fault, inside
from precondattn_conformance.faults.written_by_hand.written import written

BOTH = (FORWARD, BACKWARD)
SKIP = "nystrom[landmarks=5,skip=true]"
FEW = "nystrom[landmarks=4]"


def faults() -> list[Fault]:
    """All faults in this file."""
    return [*_of_channels(), *_of_landmarks(), *_of_inverse()]


def _of_channels() -> list[Fault]:
    return [
        written(
            "cross_covariance",
            BOTH,
            "padding and masked tokens in norms and products",
            inside(cross_covariance, "_only", lambda true: lambda valid, x: x),
        ),
        written(
            "cross_covariance",
            BOTH,
            "keys that are masked in norms and products",
            inside(cross_covariance, "_both", lambda true: lambda of_q, of_k: of_q),
        ),
        written(
            "cross_covariance",
            BACKWARD,
            "the norms constant to the gradient",
            inside(cross_covariance, "l2_norm_vjp", lambda true: _of_constant_length),
        ),
        written(
            "cross_covariance",
            FORWARD,
            "the attention matrix transposed",
            inside(cross_covariance, "softmax", lambda true: _transposed_after(true)),
        ),
    ]


def _of_constant_length(x: Any, eps: float, cotangent: Any) -> Any:
    return cotangent / l2_norm.length(x, eps)


def _transposed_after(true: Any) -> Any:
    return lambda x: namespace(x).matrix_transpose(true(x))


def _of_landmarks() -> list[Fault]:
    return [
        written(
            FEW,
            BOTH,
            "tokens after the last whole segment in no mean",
            inside(segment_means, "segment_of_tokens", lambda true: _by_whole_segments),
        ),
        written(
            FEW,
            BOTH,
            "padding in the means",
            inside(nystrom, "segment_means", lambda true: lambda m, like, *masks: true(m, like)),
        ),
        written(
            FEW,
            BOTH,
            "masked keys in the means",
            inside(nystrom, "segment_means", lambda true: _of_members_alone(true)),
        ),
        written(
            SKIP,
            BOTH,
            "the skip one token late",
            inside(token_convolution, "overlaps", lambda true: _one_later(true)),
        ),
    ]


def _by_whole_segments(m: int, tokens: int, like: Any, members: Any) -> Any:
    return namespace(like).arange(tokens)[None, :] // max(tokens // m, 1)


def _of_members_alone(true: Any) -> Any:
    return lambda m, like, members=None, counted=None: true(m, like, members)


def _one_later(true: Any) -> Any:
    def overlaps(tokens: int, width: int) -> Any:
        for a, into, of in true(tokens, width):
            if of.start > 0:
                yield a, into, slice(of.start - 1, of.stop - 1)

    return overlaps


def _of_inverse() -> list[Fault]:
    return [
        written(
            FEW,
            BOTH,
            "the start from the largest column of all sequences and heads",
            inside(iterated_inverse, "largest_sum", lambda true: _of_all(true)),
        ),
        written(
            FEW,
            BACKWARD,
            "the start constant to the gradient",
            inside(iterated_inverse, "largest_sum", lambda true: _without_share(true)),
        ),
        written(
            FEW,
            FORWARD,
            "one step of the inverse left out",
            inside(nystrom, "iterated_inverse", lambda true: _one_step_less(true)),
        ),
    ]


def _of_all(true: Any) -> Any:
    return lambda a, *, of_all: true(a, of_all=True)


def _without_share(true: Any) -> Any:
    def largest_sum(a: Any, *, of_all: bool) -> Any:
        largest, share = true(a, of_all=of_all)
        return largest, 0 * share

    return largest_sum


def _one_step_less(true: Any) -> Any:
    return lambda a, iterations, *, of_all: true(a, iterations - 1, of_all=of_all)
