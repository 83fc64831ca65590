"""Faults of the blocked attention: at the boundaries of row blocks and blocks."""

from __future__ import annotations

import math
from typing import Any

from precondattn.arrays import namespace
from precondattn.spec.array_functions import finite_or_zero
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    Fault,
)
from precondattn_conformance.faults.written_by_hand.written import blocked
from precondattn_conformance.faults.written_by_hand.wrong import (
    without_tail,
)
from precondattn_portable import (
    attention,
    query_weighted,
    read_log_mean_exp,
    read_mean,
)
from precondattn_portable.masks import Mask
from precondattn_portable.read_log_mean_exp import LogMeanExpRead
from precondattn_portable.scores import DotScores

BOTH = (FORWARD, BACKWARD)

LASER = {"subject": "softmax"}


def faults() -> list[Fault]:
    """All faults in this file."""
    return [*_of_row_blocks(), *_of_reads(), *_of_exponential_reads()]


def _of_row_blocks() -> list[Fault]:
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
            "the first key of a row block left out",
            Mask,
            "columns",
            lambda true: _narrower(true, 1, 0),
        ),
        blocked(
            "softmax[causal=false,window=3]",
            BOTH,
            "the last key of a row block left out",
            Mask,
            "columns",
            lambda true: _narrower(true, 0, 1),
        ),
        blocked("softmax", BOTH, "the mask begins a key late", Mask, "apply", _masking_a_key_late),
        blocked(
            "softmax",
            BOTH,
            "fewer queries than keys placed at the first keys",
            attention,
            "Mask",
            lambda true: lambda frame, keys, offset, *rest: true(frame, keys, 0, *rest),
        ),
        blocked(
            "softmax",
            BOTH,
            "a key mask treated as padding at the end",
            attention,
            "has_lengths_only",
            lambda _: lambda frame: frame.k_segment is None,
        ),
        blocked(
            "softmax",
            BOTH,
            "the masks of the first sequence for all sequences",
            Mask,
            "of",
            lambda true: lambda self, sequences: true(self, slice(0, 1)),
        ),
        blocked(
            "softmax[bias=true]",
            BOTH,
            "the bias of the first sequence for all sequences",
            attention.View,
            "group",
            _with_first_bias,
        ),
        blocked(
            "softmax",
            BACKWARD,
            "a key's gradient from the last block only",
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


def _narrower(true: Any, by_low: int, by_high: int) -> Any:
    def columns(self: Any, i0: int, i1: int) -> tuple[int, int]:
        low, high = true(self, i0, i1)
        low = low + by_low if low > 0 else low
        high = high - by_high if high < self.keys else high
        return low, max(low, high)

    return columns


def _masking_a_key_late(true: Any) -> Any:
    def apply(
        self: Any, ops: Any, row_block: Any, i0: int, i1: int, low: int, high: int, *rest: Any
    ) -> Any:
        column = high if self.offset is None else self.offset + i0 + 1 - low
        kept = row_block[..., column : column + 1] + 0
        masked = true(self, ops, row_block, i0, i1, low, high, *rest)
        if column < high - low:
            masked[..., column : column + 1] = kept
        return masked

    return apply


def _with_first_bias(true: Any) -> Any:
    def group(self: Any, part: Any) -> Any:
        view = true(self, part)
        if self.bias is None or self.bias.shape[0] == 1:
            return view
        first = true(self, (slice(0, view.q.shape[0]), *part[1:]))
        return view._replace(bias=first.bias)

    return group


def _pulling_last_only(true: Any) -> Any:
    def pull(self: Any, i0: int, i1: int, low: int, high: int, d_row_block: Any) -> None:
        self.d_k[:, :, low:high] = 0
        true(self, i0, i1, low, high, d_row_block)

    return pull


def _of_reads() -> list[Fault]:
    return [
        blocked(
            "softmax",
            FORWARD,
            "the row's maximum left out of the residuals",
            read_mean,
            "exponentials",
            _logarithm_of_shifted_sum,
        ),
        blocked(
            "softmax",
            FORWARD,
            "the maximum over a row's first keys as that of the whole row",
            read_mean,
            "exponentials",
            lambda _: _shifted_by_first,
        ),
        blocked(
            "softmax",
            BACKWARD,
            "the row sum left out of dS",
            read_mean.MeanRead,
            "_pulled",
            lambda true: lambda self, *args: true(self, *args[:5], 0 * args[5], *args[6:]),
        ),
    ]


def _logarithm_of_shifted_sum(true: Any) -> Any:
    def exponentials(ops: Any, row_block: Any, sink: Any = None) -> Any:
        row_block, total, _ = true(ops, row_block, sink)
        return row_block, total, namespace(total).log(total)

    return exponentials


def _shifted_by_first(ops: Any, row_block: Any, sink: Any = None) -> Any:
    xp = namespace(row_block)
    shift = finite_or_zero(xp.max(row_block[..., :2], axis=-1, keepdims=True))
    row_block = ops.exp(ops.add(row_block, -shift))
    total = xp.sum(row_block, axis=-1, keepdims=True)
    total = xp.where(total > 0, total, 1.0)
    return row_block, total, shift + xp.log(total)


def _of_exponential_reads() -> list[Fault]:
    return [
        blocked(
            "laser",
            (*BOTH, STEP),
            "one shift even for values that are far apart",
            read_log_mean_exp,
            "RANGE",
            lambda true: dict.fromkeys(true, math.inf),
            **LASER,
        ),
        blocked(
            "laser",
            (*BOTH, STEP),
            "one shift per block even for values that are far apart",
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
    def exponentials(ops: Any, row_block: Any) -> Any:
        row_block, total, log_total = true(ops, row_block)
        return row_block, total * 0 + 1, log_total

    return exponentials


def _all_narrow(true: Any) -> Any:
    def _blocks(self: Any, low: int, high: int) -> Any:
        for start, stop, _ in true(self, low, high):
            yield start, stop, True

    return _blocks
