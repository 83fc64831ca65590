"""Faults of leaves that sum over all tokens of a sequence: channels and landmarks."""

from __future__ import annotations

from precondattn.arrays import Array, namespace
from precondattn.spec import (
    cross_covariance,
    iterated_inverse,
    nystrom,
    segment_means,
)
from precondattn.spec.channel import Channel
from precondattn_conformance.faults.fault import BACKWARD, FORWARD, Fault, Function, inside
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
            inside(cross_covariance, "valid_rows", lambda true: lambda x, valid: true(x, None)),
        ),
        written(
            "cross_covariance",
            BOTH,
            "keys that are masked in norms and products",
            inside(cross_covariance, "valid_as_both", lambda true: lambda of_q, of_k: of_q),
        ),
        written(
            "channel[scale_by=tokens]",
            BOTH,
            "masked tokens in the number of tokens",
            inside(Channel, "factor", lambda true: lambda self, q, valid: true(self, q, None)),
        ),
    ]


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
    ]


def _by_whole_segments(m: int, tokens: int, like: Array, members: Array | None) -> Array:
    return namespace(like).arange(tokens)[None, :] // max(tokens // m, 1)


def _of_members_alone(true: Function) -> Function:
    return lambda m, like, members=None, counted=None: true(m, like, members)


def _of_inverse() -> list[Fault]:
    return [
        written(
            FEW,
            BOTH,
            "the start from the largest column of all sequences and heads",
            inside(iterated_inverse, "largest_sum", lambda true: _of_all(true)),
        ),
    ]


def _of_all(true: Function) -> Function:
    return lambda a, *, of_all: true(a, of_all=True)
