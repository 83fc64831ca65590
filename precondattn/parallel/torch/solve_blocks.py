"""The blocks of LUCID's solve, and the order in which processes solve them.

The process that has a block solves it and broadcasts it, and all subtract Φ y from their remaining
rows. The owner of the next block subtracts from that block first, solves it, and broadcasts it
while all subtract from their other rows (`solve.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch import Tensor

from precondattn.arrays import Arrays, Tree, upcast
from precondattn.parallel.layouts import TokenPart
from precondattn.parallel.solve import BLOCK, keys_of_scores
from precondattn.parallel.torch.call import tried
from precondattn.parallel.torch.piece import DividedPiece, crossing
from precondattn.spec.lucid import LucidSolve


@dataclass(frozen=True)
class SolveBlocks:
    """The blocks of a solve, and the exchanges between them."""

    piece: DividedPiece

    @cached_property
    def all(self) -> tuple[TokenPart, ...]:
        """All blocks, in the order of the sequence."""
        return tuple(
            TokenPart(part.device, slice(start, min(start + BLOCK, part.rows.stop)), first)
            for part in self.piece.parts
            for start, first in zip(
                range(part.rows.start, part.rows.stop, BLOCK),
                range(part.first, part.first + part.tokens, BLOCK),
                strict=True,
            )
        )

    @property
    def rank(self) -> int:
        return self.piece.processes.rank

    @property
    def leaf(self) -> LucidSolve:
        leaf = self.piece.leaf
        assert isinstance(leaf, LucidSolve)
        return leaf

    @cached_property
    def own(self) -> tuple[TokenPart, ...]:
        """The blocks of this process."""
        return tuple(block for block in self.all if block.device == self.rank)

    def later(self, block: TokenPart) -> slice:
        """This process's rows after a block."""
        count = self.piece.count(self.rank)
        starts = (own.rows.start for own in self.own if own.first > block.first)
        return slice(next(starts, count), count)

    def earlier(self, block: TokenPart) -> slice:
        """This process's rows before a block."""
        stops = (own.rows.stop for own in reversed(self.own) if own.first < block.first)
        return slice(0, next(stops, 0))

    def unit(self, k: Tensor) -> Tensor:
        """The keys from which the scores are computed."""
        return keys_of_scores(self.leaf, k)

    def of_block(self, block: TokenPart, k: Tensor, u: Tensor, beta: Tensor | None) -> Arrays:
        """The arguments of the solve of one block, with the right-hand sides u."""
        rows = block.rows
        given = {"k": upcast(k[:, rows]), "v": u[:, rows]}
        if beta is not None:
            given["lucid_beta"] = upcast(beta[:, rows])
        return {**given, **self.piece.masks.of_rows(self.rank, rows), "backend": self.piece.backend}

    def visible(
        self, block: TokenPart, rows: slice, at: int
    ) -> tuple[Tensor | None, Tensor | None, bool]:
        """Which tokens of a block (b, B) and of this process's rows (b, t) have pairs that are not
        masked; `at` is −1 for rows after the block, and 0 for rows before it."""
        masks = self.piece.masks
        of_block, of_rows = masks.segment_of(block.device), masks.segment_of(self.rank)
        both = crossing(
            None if of_block is None else of_block[:, block.rows],
            at,
            None if of_rows is None else of_rows[:, rows],
        )
        tokens, others = both if both is not None else (None, None)
        any_visible = others is None or bool(others.any())
        return tokens, others, any_visible

    def given_away(self, block: TokenPart, arrays: Sequence[Tensor]) -> tuple[list[Tensor], Tree]:
        """The owner's rows of the block on all processes, and the work handle to wait for."""
        processes = self.piece.processes
        group, rank, devices = processes.group, processes.rank, processes.devices
        if block.device == rank:
            sent = [x[:, block.rows].contiguous() for x in arrays]
        else:
            sent = [x.new_empty(x.shape[0], block.tokens, *x.shape[2:]) for x in arrays]
        if devices == 1:
            return sent, ()
        source = dist.get_global_rank(group, block.device)
        return sent, [dist.broadcast(x, source, group=group, async_op=True) for x in sent]


class Failed:
    """A place for the first error of this process."""

    error: Exception | None = None

    def run(self, function: Callable[[], None]) -> None:
        if self.error is None:
            _, self.error = tried(function)


def in_order(
    blocks: SolveBlocks,
    order: Sequence[TokenPart],
    arrays: tuple[Tensor, Tensor],
    rest: Callable[[TokenPart], slice],
    solve: Callable[[TokenPart], None],
    subtract: Callable[[TokenPart, Tensor, Tensor, slice], None],
    failed: Failed,
    collect: Callable[[TokenPart, Tensor], None] | None = None,
) -> None:
    """Solve the blocks, broadcast each, and subtract its product from the remaining rows.

    The process that has the next block subtracts from that block first, and broadcasts it before it
    subtracts from its other rows.
    """
    if order[0].device == blocks.rank:
        failed.run(lambda: solve(order[0]))
    given, works = blocks.given_away(order[0], arrays)
    for number, block in enumerate(order):
        for work in works:
            work.wait()
        (keys, values), rows = given, rest(block)
        following = order[number + 1] if number + 1 < len(order) else None
        if following is not None:
            if following.device == blocks.rank:
                first = following.rows
                failed.run(lambda: subtract(block, keys, values, first))  # noqa: B023
                failed.run(lambda: solve(following))  # noqa: B023
                # The rows of the next block are the first or the last of the rest.
                rows = (
                    slice(first.stop, rows.stop)
                    if first.start == rows.start
                    else slice(rows.start, first.start)
                )
            given, works = blocks.given_away(following, arrays)
        failed.run(lambda: subtract(block, keys, values, rows))  # noqa: B023
        if collect is not None:
            collect(block, keys)


def added(blocks: SolveBlocks, block: TokenPart, x: Tensor) -> Tensor:
    """The sum of x over all processes, on the process that has the block."""
    processes = blocks.piece.processes
    group, devices = processes.group, processes.devices
    if devices > 1:
        dist.reduce(x, dist.get_global_rank(group, block.device), group=group)
    return x
