"""Faults of blocked attention at the boundaries of row blocks and key blocks."""

from __future__ import annotations

from collections.abc import Iterator

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import finite_or_zero
from precondattn_conformance.faults.fault import BACKWARD, FORWARD, STEP, Fault, Function
from precondattn_conformance.faults.written_by_hand.written import blocked
from precondattn_portable import (
    attention,
    masks,
    read_mean,
)
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.layout import Tile
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
            "softmax", BOTH, "the last, shorter block left out", masks, "blocks", _without_tail
        ),
        blocked(
            "softmax",
            FORWARD,
            "the last group of heads left out",
            attention,
            "groups_with_scratch",
            lambda true: (
                lambda *given, **named: [*true(*given, **named)][:-1] or [*true(*given, **named)]
            ),
        ),
        blocked(
            "softmax",
            BOTH,
            "fewer queries than keys placed at the first keys",
            attention,
            "Mask",
            lambda true: (
                lambda frame, keys, offset, *rest, **named: true(frame, keys, 0, *rest, **named)
            ),
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
            "of_part",
            lambda true: lambda self, part: true(self, (slice(0, 1), *part[1:])),
        ),
        blocked(
            "softmax[bias=true]",
            BOTH,
            "the bias of the first sequence for all sequences",
            attention.AttentionView,
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
            masks,
            "blocks",
            _without_tail,
        ),
    ]


def _without_tail(true: Function) -> Function:
    """`blocks` without the last block, if it is shorter than the others."""

    def blocks(count: int, size: int) -> Iterator[tuple[int, int]]:
        for start, stop in true(count, size):
            if stop - start == size or not start:
                yield start, stop

    return blocks


def _with_first_bias(true: Function) -> Function:
    def group(self: attention.AttentionView, part: tuple[slice, ...]) -> attention.AttentionView:
        view: attention.AttentionView = true(self, part)
        if self.bias is None or self.bias.shape[0] == 1:
            return view
        first = true(self, (slice(0, view.q.shape[0]), *part[1:]))
        return view._replace(bias=first.bias)

    return group


def _pulling_last_only(true: Function) -> Function:
    def pull(self: DotScores, tile: Tile, d_row_block: Array) -> None:
        self.d_k[tile.keys] = 0
        true(self, tile, d_row_block)

    return pull


def _of_reads() -> list[Fault]:
    return [
        blocked(
            "softmax",
            FORWARD,
            "the maximum over a row's first keys as that of the whole row",
            read_mean,
            "exponentials",
            lambda _: _shifted_by_first,
        ),
    ]


def _shifted_by_first(
    ops: Arithmetic, row_block: Array, sink: Array | None = None
) -> tuple[Array, Array, Array]:
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
            "the last block of keys left out, where there are several",
            LogMeanExpRead,
            "_blocks",
            lambda true: (
                lambda self, low, high: [*true(self, low, high)][:-1] or [*true(self, low, high)]
            ),
            **LASER,
        ),
    ]
