"""Softmax attention and LASER over keys that come in parts: merged outputs, gradients of parts.

With λ = log Σ_r e^{λ_r} and the weights w_r = e^{λ_r − λ} of the parts,

    mean:     o = Σ_r w_r o_r            of o, λ and do directly (`part_vjp`)
    LASER:    o = log Σ_r w_r e^{o_r}    do_r = w_r e^{o_r − o} ∘ do,
                                         dλ_r = Σ_c do_rc − w_r Σ_c do_c

for each channel c. For LASER, λ_r is computed from the same scores by a call with one channel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.arrays import Array, namespace
from precondattn.given import Arguments
from precondattn.parallel.partial_attention import merge, part_vjp, with_lse, with_lse_vjp
from precondattn.spec.array_functions import finite_or_zero
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.read import MEAN
from precondattn.spec.softmax import Softmax

READS = (MEAN, LOG_MEAN_EXP)

Attended = tuple[Array, Array]
"""Output (b, t, h, e) and log-sum-exp of the scores (b, t, h)"""


class WholeRows(NamedTuple):
    """The results of some queries over all keys, from which the gradients of a part follow."""

    out: Array
    lse: Array
    """The log-sum-exp over all keys; ∞ for queries that see no key of the part"""
    d_out: Array

    @classmethod
    def of_output(cls, out: Array, lse: Array, d_out: Array, seen_by: Array | None) -> WholeRows:
        """The results for a part whose keys the queries `seen_by` (b, t) may see; None for all."""
        sees = lse > -math.inf
        if seen_by is not None:
            sees = sees & seen_by[..., None]
        return cls(out, namespace(lse).where(sees, lse, math.inf), d_out)


@dataclass(frozen=True)
class MeanOfParts:
    """Parts of softmax attention, o = A v."""

    softmax: Softmax
    options: Arguments

    def attend(self, *tokens: Array) -> Attended:
        return with_lse(self.softmax, *tokens, **self.options)

    def merged(self, one: Attended, other: Attended) -> Attended:
        return merge(*zip(one, other, strict=True))

    def pulled(self, tokens: Sequence[Array], whole: WholeRows) -> dict[str, Array]:
        """The gradients of q, k and v of a part."""
        inputs = dict(zip("qkv", tokens, strict=True))
        return part_vjp(self.softmax, inputs, *whole, **self.options)


class LaserOfParts(MeanOfParts):
    """Parts of LASER, o = log(A eᵛ)."""

    @property
    def _mean(self) -> Softmax:
        return replace(self.softmax, read=MEAN)

    def attend(self, *tokens: Array) -> Attended:
        out = self.softmax(*tokens, **self.options)
        _, lse = with_lse(self._mean, *_of_one_channel(tokens), **self.options)
        return out, lse

    def merged(self, one: Attended, other: Attended) -> Attended:
        xp = namespace(one[1])
        lse = xp.logaddexp(one[1], other[1])
        logs = [out + lse[..., None] for out, lse in (one, other)]
        out = xp.logaddexp(*logs) - finite_or_zero(lse)[..., None]
        return finite_or_zero(out), lse

    def pulled(self, tokens: Sequence[Array], whole: WholeRows) -> dict[str, Array]:
        """The gradients of q, k and v of a part."""
        out, pull = self.softmax.vjp(*tokens, **self.options)
        (one, lse), pull_lse = with_lse_vjp(self._mean, *_of_one_channel(tokens), **self.options)
        xp, log_weight = namespace(lse), (lse - whole.lse)[..., None]
        # One exponential of the sum: where w_r underflows, e^{o_r − o} can overflow.
        d_out = xp.exp(log_weight + out - whole.out) * whole.d_out
        d_lse = (d_out - xp.exp(log_weight) * whole.d_out).sum(-1)
        gradients: dict[str, Array] = pull(d_out)
        of_lse = pull_lse(xp.zeros_like(one), d_lse)
        return {
            "q": gradients["q"] + of_lse["q"],
            "k": gradients["k"] + of_lse["k"],
            "v": gradients["v"],
        }


def read_of(softmax: Softmax, options: Arguments) -> MeanOfParts:
    """The class that merges parts for the `read` of a leaf, which is one of `READS`."""
    return (MeanOfParts if softmax.read == MEAN else LaserOfParts)(softmax, options)


def _of_one_channel(tokens: Sequence[Array]) -> tuple[Array, Array, Array]:
    q, k, v = tokens
    return q, k, v[..., :1]


def goes_around(leaf: LeafProtocol) -> bool:
    """Whether a leaf's output can be merged from its attention to parts of the keys."""
    assert isinstance(leaf, Softmax)  # Other leaves have no such scores.
    return set(leaf.inputs) == {"q", "k", "v"} and leaf.window is None and leaf.read in READS
