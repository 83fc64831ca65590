"""Leaves that sum over all tokens of a sequence, and so are not causal.

A packed segment is computed as a sequence of its own. For segment g of a sequence, with [g]_i = 1
for its tokens,

    x^g = [g] ∘ x,    o = Σ_g [g] ∘ attend(x^g),    dx = Σ_g [g] ∘ attend_vjp(x^g, [g] ∘ do).

The number of segments is read where it is known on the host. Elsewhere there may be as many as
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from precondattn.algebra import Leaf, ShapeError
from precondattn.arrays import (
    arange_like,
    cast,
    differs_from_previous,
    is_traced,
    namespace,
    zero_where_not,
)
from precondattn.frame import Frame
from precondattn.frameworks.types import Array, Arrays, ByName, Residuals
from precondattn.spec.array_functions import repeat_heads, swap_time_and_heads


@dataclass(frozen=True)
class WholeSequence(Leaf):
    """A leaf without a cache, whose outputs depend on all valid tokens of their sequence.

    Subclasses define `attend` and `attend_vjp` of sequences that are not packed.
    """

    reads_all_queries = True

    def attend(self, x: ByName, q_valid: Array | None, k_valid: Array | None) -> Array:
        """The output. `q_valid` (b, t) and `k_valid` (b, s) are None where all
        tokens are valid."""
        raise NotImplementedError

    def attend_vjp(
        self, x: ByName, q_valid: Array | None, k_valid: Array | None, cotangent: Array
    ) -> Arrays:
        """The gradient of every input."""
        raise NotImplementedError

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        if frame.k_segment is None:
            return self.attend(x, frame.q_valid, frame.k_valid), ()
        split = _Segments(frame)
        return split.joined(self.attend(self._split(x, split), *split.valid)), ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        if frame.k_segment is None:
            return self.attend_vjp(x, frame.q_valid, frame.k_valid, cotangent)
        split = _Segments(frame)
        gradients = self.attend_vjp(self._split(x, split), *split.valid, split.parts(cotangent))
        return {
            name: split.joined(array) if self._has_tokens(name) else array
            for name, array in gradients.items()
        }

    def _has_tokens(self, name: str) -> bool:
        return self.inputs[name].time_axis is not None

    def _split(self, x: ByName, split: _Segments) -> Arrays:
        return {
            name: split.parts(array) if self._has_tokens(name) else array
            for name, array in x.items()
        }


def valid_as_both(q_valid: Array | None, k_valid: Array | None) -> Array | None:
    """Which tokens are masked neither as queries nor as keys; None where none is masked."""
    if q_valid is None or k_valid is None:
        return k_valid if q_valid is None else q_valid
    return q_valid & k_valid


def check_same_tokens(leaf: Leaf, what: str, sizes: Mapping[str, int]) -> None:
    """Raise an error where there are not as many queries as keys."""
    t, s = sizes["t"], sizes["s"]
    if t != s:
        raise ShapeError(
            f"{leaf}: {what} over the same tokens of queries and keys, so as many of both are "
            f"expected; found t = {t} and s = {s}"
        )


def only_valid(valid: Array | None, x: Array) -> Array:
    """x (b, h, t, d), 0 at masked tokens."""
    return x if valid is None else zero_where_not(valid[:, None, :, None], x)


def valid_rows(x: ByName, valid: Array | None) -> tuple[Array, Array, Array]:
    """q, k and v (b, h, t, d) with a key and value for each query head, 0 at masked tokens."""
    h = x["q"].shape[2]
    q, k, v = (only_valid(valid, swap_time_and_heads(x[name])) for name in "qkv")
    return q, repeat_heads(k, h), repeat_heads(v, h)


def segment_numbers(ids: Array) -> Array:
    """0, 1, … for the segments of each sequence, (b, t) from their ids."""
    xp = namespace(ids)
    return xp.cumulative_sum(cast(differs_from_previous(ids), xp.int32), axis=1, dtype=xp.int32)


class _Segments:
    """The segments of a packed call, each as a sequence: (b, t, …) as (b g, t, …) and back."""

    def __init__(self, frame: Frame) -> None:
        ids = frame.k_segment
        assert ids is not None
        number = segment_numbers(ids)
        xp = namespace(number)
        count = number.shape[1] if is_traced(number) else int(xp.max(number)) + 1
        self.members = number[:, None, :] == arange_like(count, number)[None, :, None]
        """(b, g, t)"""
        q, k = (
            self._flat(self.members if valid is None else self.members & valid[:, None, :])
            for valid in (frame.q_valid, frame.k_valid)
        )
        self.valid = q, k

    def parts(self, x: Array) -> Array:
        return self._flat(zero_where_not(self._like(x.ndim), x[:, None, ...]))

    def joined(self, x: Array) -> Array:
        xp = namespace(x)
        x = xp.reshape(x, (*self.members.shape[:2], *x.shape[1:]))
        return xp.sum(zero_where_not(self._like(x.ndim - 1), x), axis=1)

    def _like(self, rank: int) -> Array:
        return namespace(self.members).reshape(
            self.members, (*self.members.shape, *(1,) * (rank - 2))
        )

    def _flat(self, x: Array) -> Array:
        return namespace(x).reshape(x, (-1, *x.shape[2:]))
