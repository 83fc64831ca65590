"""Faults of the blocked attention and the blocked solve: at the seams of blocks and strips."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from precondattn.arrays import namespace
from precondattn.spec.array_functions import finite_or_zero, identity_like
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    Fault,
    inside,
)
from precondattn_conformance.faults.written import written
from precondattn_portable import (
    attention,
    extension,
    lucid_solve,
    query_weighted,
    read_log_mean_exp,
    read_mean,
)
from precondattn_portable.layout import time_first
from precondattn_portable.lucid_solve import LucidSolveBlocks, PastSystem, System
from precondattn_portable.read_log_mean_exp import LogMeanExpRead
from precondattn_portable.scores import DotScores
from precondattn_portable.sight import Sight

BOTH = (FORWARD, BACKWARD)


def faults() -> list[Fault]:
    """All of them."""
    return [
        *_of_strips(),
        *_of_reads(),
        *_of_exponential_reads(),
        *_of_the_solve(),
        *_of_the_unbounded_solve(),
        *_of_steps(),
    ]


def blocked(
    mechanism: str,
    stages: tuple[str, ...] | str,
    detail: str,
    owner: Any,
    name: str,
    change: Any,
    subject: str = "",
) -> Fault:
    """A fault of the blocked carrier: `owner.name` is `change` of what it was."""
    planted = inside(owner, name, change)
    return written(mechanism, stages, detail, planted, carrier="blocks", subject=subject)


def _of_strips() -> list[Fault]:
    return [
        blocked(
            "softmax", BOTH, "the last, shorter block left out", attention, "blocks", without_tail
        ),
        blocked(
            "softmax",
            FORWARD,
            "the last group of heads left out",
            attention,
            "head_groups",
            lambda true: lambda *sizes: [*true(*sizes)][:-1] or [*true(*sizes)],
        ),
        blocked(
            "softmax[window=3]",
            BOTH,
            "the first key of a strip left out",
            Sight,
            "columns",
            lambda true: _narrower(true, 1, 0),
        ),
        blocked(
            "softmax[causal=false,window=3]",
            BOTH,
            "the last key of a strip left out",
            Sight,
            "columns",
            lambda true: _narrower(true, 0, 1),
        ),
        blocked("softmax", BOTH, "the mask begins a key late", Sight, "hide", _masking_a_key_late),
        blocked(
            "softmax",
            BOTH,
            "fewer queries than keys stand at the first keys",
            attention,
            "Sight",
            lambda true: lambda frame, keys, offset, *rest: true(frame, keys, 0, *rest),
        ),
        blocked(
            "softmax",
            BOTH,
            "a key mask taken for padding at the end",
            attention,
            "has_lengths_only",
            lambda _: lambda frame: frame.k_segment is None,
        ),
        blocked(
            "softmax",
            BOTH,
            "the masks of the first sequence for all",
            Sight,
            "of",
            lambda true: lambda self, sequences: true(self, slice(0, 1)),
        ),
        blocked(
            "softmax[bias=true]",
            BOTH,
            "the bias of the first sequence for all",
            attention.View,
            "group",
            _with_first_bias,
        ),
        blocked(
            "softmax",
            BACKWARD,
            "a key has the gradient of the last block alone",
            DotScores,
            "pull",
            _pulling_last_only,
        ),
        blocked(
            "query_weighted_query",
            BOTH,
            "the last, shorter block left out",
            query_weighted,
            "blocks",
            without_tail,
        ),
        blocked(
            "query_weighted_query",
            BACKWARD,
            "the sums of each row left out",
            query_weighted,
            "row_sum",
            lambda true: lambda x: 0 * true(x),
        ),
    ]


def without_tail(true: Any) -> Any:
    """`blocks`, without a last one that is shorter than the others."""

    def blocks(count: int, size: int) -> Iterator[tuple[int, int]]:
        for start, stop in true(count, size):
            if stop - start == size or not start:
                yield start, stop

    return blocks


def _narrower(true: Any, by_low: int, by_high: int) -> Any:
    def columns(self: Any, i0: int, i1: int) -> tuple[int, int]:
        low, high = true(self, i0, i1)
        low = low + by_low if low > 0 else low
        high = high - by_high if high < self.keys else high
        return low, max(low, high)

    return columns


def _masking_a_key_late(true: Any) -> Any:
    def hide(
        self: Any, ops: Any, strip: Any, i0: int, i1: int, low: int, high: int, *rest: Any
    ) -> Any:
        column = high if self.offset is None else self.offset + i0 + 1 - low
        kept = strip[..., column : column + 1] + 0
        found = true(self, ops, strip, i0, i1, low, high, *rest)
        if column < high - low:
            found[..., column : column + 1] = kept
        return found

    return hide


def _with_first_bias(true: Any) -> Any:
    def group(self: Any, part: Any) -> Any:
        found = true(self, part)
        if self.bias is None or self.bias.shape[0] == 1:
            return found
        first = true(self, (slice(0, found.q.shape[0]), *part[1:]))
        return found._replace(bias=first.bias)

    return group


def _pulling_last_only(true: Any) -> Any:
    def pull(self: Any, i0: int, i1: int, low: int, high: int, d_strip: Any) -> None:
        self.d_k[:, :, low:high] = 0
        true(self, i0, i1, low, high, d_strip)

    return pull


def _of_reads() -> list[Fault]:
    return [
        blocked(
            "softmax",
            FORWARD,
            "the row's maximum left out of what is kept for the gradient",
            read_mean,
            "exponentials",
            _logarithm_of_shifted_sum,
        ),
        blocked(
            "softmax",
            FORWARD,
            "the maximum of a row's first keys for all of it",
            read_mean,
            "exponentials",
            lambda _: _shifted_by_first,
        ),
        blocked(
            "softmax",
            BACKWARD,
            "the softmax's own sum left out of dS",
            read_mean,
            "row_sum",
            lambda true: lambda x: 0 * true(x),
        ),
    ]


def _logarithm_of_shifted_sum(true: Any) -> Any:
    def exponentials(ops: Any, strip: Any) -> Any:
        strip, total, _ = true(ops, strip)
        return strip, total, namespace(total).log(total)

    return exponentials


def _shifted_by_first(ops: Any, strip: Any) -> Any:
    xp = namespace(strip)
    shift = finite_or_zero(xp.max(strip[..., :2], axis=-1, keepdims=True))
    strip = ops.exp(ops.add(strip, -shift))
    total = xp.sum(strip, axis=-1, keepdims=True)
    total = xp.where(total > 0, total, 1.0)
    return strip, total, shift + xp.log(total)


LASER = {"subject": "softmax"}


def _of_exponential_reads() -> list[Fault]:
    return [
        blocked(
            "laser",
            (*BOTH, STEP),
            "one shift for values however far apart",
            read_log_mean_exp,
            "RANGE",
            lambda true: dict.fromkeys(true, math.inf),
            **LASER,
        ),
        blocked(
            "laser",
            (*BOTH, STEP),
            "one shift for the values of a block however far apart",
            LogMeanExpRead,
            "_blocks",
            _all_narrow,
            **LASER,
        ),
        blocked(
            "laser",
            (*BOTH, STEP),
            "the last block of keys left out, where there are several",
            LogMeanExpRead,
            "_blocks",
            lambda true: (
                lambda self, low, high: [*true(self, low, high)][:-1] or [*true(self, low, high)]
            ),
            **LASER,
        ),
        blocked(
            "laser",
            FORWARD,
            "the weights not divided by their sum",
            read_log_mean_exp,
            "exponentials",
            _undivided,
            **LASER,
        ),
        blocked(
            "laser",
            BACKWARD,
            "the values' gradient without e^{v - ν}",
            LogMeanExpRead,
            "finish",
            lambda _: lambda self: self.d_v,
            **LASER,
        ),
    ]


def _undivided(true: Any) -> Any:
    def exponentials(ops: Any, strip: Any) -> Any:
        strip, total, log_total = true(ops, strip)
        return strip, total * 0 + 1, log_total

    return exponentials


def _all_narrow(true: Any) -> Any:
    def _blocks(self: Any, low: int, high: int) -> Any:
        for start, stop, _ in true(self, low, high):
            yield start, stop, True

    return _blocks


SOLVE = "lucid_solve"


def _of_the_solve() -> list[Fault]:
    return [
        blocked(SOLVE, BOTH, "a strip sees none of the past", System, "rows", _own_strip_only),
        blocked(
            SOLVE,
            FORWARD,
            "a strip's second block does not see the first",
            System,
            "weights",
            _blind_second_block,
        ),
        blocked(
            SOLVE,
            FORWARD,
            "a diagonal block's inverse of first order",
            lucid_solve,
            "unit_lower_inverse",
            lambda _: first_order,
        ),
        blocked(
            SOLVE,
            BOTH,
            "a diagonal block inverted half by half",
            lucid_solve,
            "unit_lower_inverse",
            half_by_half,
        ),
        blocked(
            SOLVE,
            FORWARD,
            "the shift left out of the strips",
            System,
            "__init__",
            lambda true: changed_after(true, shift=0.0, factor=1.0),
        ),
        blocked(
            SOLVE,
            BACKWARD,
            "the right sides of earlier blocks not brought up to date",
            LucidSolveBlocks,
            "_pull_rows",
            _pulling_a_copy,
        ),
        blocked(
            "lucid_solve[window=3]",
            BOTH,
            "a block's window from its last row",
            Sight,
            "columns",
            lambda true: lambda self, i0, i1: true(self, i1 - 1, i1),
        ),
    ]


def _own_strip_only(true: Any) -> Any:
    def rows(self: Any, *, reverse: bool = False) -> Any:
        for i0, i1, _ in true(self, reverse=reverse):
            yield i0, i1, i0

    return rows


def _blind_second_block(true: Any) -> Any:
    def weights(self: Any, i0: int, i1: int, low: int, high: int) -> Any:
        is_second = high == i0 and (i0 // self.size) % 2 == 1
        return true(self, i0, i1, low, high) * (0 if is_second else 1)

    return weights


def first_order(ops: Any, strict: Any, out: Any = None) -> Any:
    """I − L for (I + L)⁻¹."""
    return identity_like(strict) - strict


def half_by_half(true: Any) -> Any:
    """[[A⁻¹, 0], [0, B⁻¹]] for the inverse of [[A, 0], [C, B]]."""

    def unit_lower_inverse(ops: Any, strict: Any, out: Any = None) -> Any:
        found, half = true(ops, strict, out), strict.shape[-1] // 2
        found[..., half:, :half] = 0
        return found

    return unit_lower_inverse


def changed_after(true: Any, **values: Any) -> Any:
    """`__init__`, after which some attributes have other values."""

    def made(self: Any, *given: Any, **named: Any) -> None:
        true(self, *given, **named)
        for name, value in values.items():
            setattr(self, name, value(self) if callable(value) else value)

    return made


def _pulling_a_copy(true: Any) -> Any:
    def _pull_rows(self: Any, *given: Any) -> Any:
        *first, y, right, room = given
        return true(self, *first, y, right + 0, room)

    return _pull_rows


def _of_the_unbounded_solve() -> list[Fault]:
    return [
        blocked(
            "lucid_solve[normalize=rows]",
            BOTH,
            "a row's maximum from its own block alone",
            System,
            "_row_maxima",
            _maxima_of_own,
        ),
        blocked(
            "lucid_solve[normalize=none]",
            FORWARD,
            "the diagonal taken for 1",
            System,
            "_beta",
            lambda true: lambda self: self.view.beta,
        ),
        blocked(
            "lucid_solve[normalize=none]",
            BACKWARD,
            "what reaches the scores through the diagonal left out",
            LucidSolveBlocks,
            "_of_diagonal",
            lambda true: lambda *given: 0 * true(*given),
        ),
    ]


def _maxima_of_own(true: Any) -> Any:
    def _row_maxima(self: Any, own: Any) -> Any:
        xp = namespace(own)
        place = xp.broadcast_to(xp.arange(own.shape[2])[:, None], own.shape)
        return own, place

    return _row_maxima


def _of_steps() -> list[Fault]:
    return [
        blocked(
            SOLVE,
            STEP,
            "the norms of past keys left out",
            PastSystem,
            "__init__",
            lambda true: changed_after(true, rms=None),
        ),
        blocked(
            SOLVE,
            STEP,
            "no solve among the new tokens",
            LucidSolveBlocks,
            "among_new",
            lambda _: _unsolved,
        ),
        blocked(
            "lucid",
            STEP,
            "in one go: no solve among the new tokens",
            LucidSolveBlocks,
            "among_new",
            lambda _: _unsolved,
        ),
        blocked(
            "lucid",
            STEP,
            "in one go: the shift left out of what is read of the past",
            PastSystem,
            "__init__",
            lambda true: changed_after(true, factor=1.0),
        ),
        blocked(
            "lucid",
            STEP,
            "in one go: the keys' own norms for those of the past",
            PastSystem,
            "__init__",
            lambda true: changed_after(true, rms=lambda self: self.rms * 0 + self.own_rms.mean()),
        ),
        blocked(
            "softmax",
            STEP,
            "sequences of several lengths taken for one length",
            attention,
            "filled",
            _all_alike,
        ),
        blocked(
            "query_weighted_query",
            STEP,
            "the cache not carried from piece to piece of a long extension",
            extension,
            "updated",
            lambda _: lambda buffer, *given, **named: buffer,
        ),
    ]


def _unsolved(self: Any, ops: Any, leaf: Any, x: Any, right: Any, known: Any, frame: Any) -> Any:
    y = time_first(right)
    return y if not leaf.beta else x["lucid_beta"][..., None] * y


def _all_alike(true: Any) -> Any:
    def filled(frame: Any, capacity: int) -> Any:
        known = true(frame, capacity)
        return known._replace(offset=known.count, frame=known.frame.replaced(k_valid=None))

    return filled
