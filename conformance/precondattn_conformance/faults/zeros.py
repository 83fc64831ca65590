"""Faults that multiply by 0 terms that should be left out: 0 · NaN is NaN.

    o + 0 · Σ k    of all tokens of a sequence,    o + 0 · Σ v    of all sequences

They change nothing on finite inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from precondattn.algebra.piece import Piece
from precondattn.arrays import Array, namespace
from precondattn_conformance.faults.applicable import Named, looks_at_other_tokens
from precondattn_conformance.faults.fault import BACKWARD, FORWARD, MethodCall, MethodResult, Truth


def zero_times(m: Piece, stage: str) -> Named:
    """0 times the sum of the other sequences in the batch and, in softmax, of later keys."""
    if stage not in (FORWARD, BACKWARD) or "v" not in m.inputs or not looks_at_other_tokens(m):
        return
    is_masked = all(getattr(leaf, "hides_later_keys", False) for leaf in m.program.leaves)
    if stage == FORWARD and m.offers.causal and is_masked:
        yield "the keys of all tokens", partial(_plus_zero, "k", _of_a_sequence)
    yield "the values of all sequences", partial(_plus_zero, "v", _of_all)


def _plus_zero(
    name: str, total: Callable[[Array, Array], Array], truth: Truth, call: MethodCall
) -> MethodResult:
    result = truth(call)
    if call.stage == FORWARD:
        return replace(result, out=result.out + 0 * total(call.inputs[name], result.out))
    gradients = {n: g + 0 * total(call.inputs[name], g) for n, g in result.gradients.items()}
    return replace(result, gradients=gradients)


def _of_a_sequence(x: Array, like: Array) -> Array:
    total = namespace(x).sum(x, axis=tuple(range(1, x.ndim)))
    return namespace(x).reshape(total, (-1,) + (1,) * (like.ndim - 1))


def _of_all(x: Array, like: Array) -> Array:
    return namespace(x).sum(x)


OPERATORS = {"zero times": zero_times}
