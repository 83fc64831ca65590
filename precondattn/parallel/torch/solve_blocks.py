"""The blocks of LUCID's solve, and the order in which processes solve them.

The process that has a block solves it and broadcasts it, and all subtract Φ y from their remaining
rows. The owner of the next block subtracts from that block first, solves it, and broadcasts it
while all subtract from their other rows (`solve.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from precondattn.arrays import Arrays, Tree, upcast
from precondattn.parallel.layouts import TokenPart
from precondattn.parallel.masks import crossing
from precondattn.parallel.solve import BLOCK
from precondattn.parallel.torch.processes import MeshProcesses, tried
from precondattn.parallel.ways import DividedPiece
from precondattn.spec.lucid import LucidSolve


class SolveBlocks:
    """The blocks of a solve, and the exchanges between them."""

    def __init__(self, piece: DividedPiece) -> None:
        self.piece = piece
        self.leaf: LucidSolve = piece.leaf
        self.processes: MeshProcesses = piece.call.processes
        self.rank = self.processes.rank
        self.all = tuple(
            TokenPart(part.device, slice(start, min(start + BLOCK, part.rows.stop)), position)
            for part in piece.call.parts
            for start, position in zip(
                range(part.rows.start, part.rows.stop, BLOCK),
                range(part.first, part.first + part.tokens, BLOCK),
                strict=True,
            )
        )
        """All blocks, in the order of the sequence."""
        self.of_process = tuple(block for block in self.all if block.device == self.rank)

    def later(self, block: TokenPart) -> slice:
        """This process's rows after a block."""
        count = self.piece.call.counts[self.rank]
        starts = (mine.rows.start for mine in self.of_process if mine.first > block.first)
        return slice(next(starts, count), count)

    def earlier(self, block: TokenPart) -> slice:
        """This process's rows before a block."""
        stops = (mine.rows.stop for mine in reversed(self.of_process) if mine.first < block.first)
        return slice(0, next(stops, 0))

    def of_block(self, block: TokenPart, k: Tensor, u: Tensor, beta: Tensor | None) -> Arrays:
        """The arguments of the solve of one block, with the right-hand sides u."""
        rows = block.rows
        tokens = {"k": upcast(k[:, rows]), "v": u[:, rows]}
        if beta is not None:
            tokens["lucid_beta"] = upcast(beta[:, rows])
        return {
            **tokens,
            **self.piece.masks.of_rows(self.rank, rows),
            "backend": self.piece.call.backend,
        }

    def visible(
        self, block: TokenPart, rows: slice, *, is_later: bool
    ) -> tuple[bool, Tensor | None, Arrays]:
        """The mask of attention between a block and this process's rows before or after it.

        The later ones are the queries. The results are whether a key is visible, which queries
        (b, t) see any (None if all do), and the options of the attention.
        """
        segments, is_any = self.piece.masks.segment, rows.start < rows.stop
        options = {"backend": self.piece.call.backend}
        if segments is None or not is_any:
            return is_any, None, options
        run, others = segments[block.device][:, block.rows], segments[self.rank][:, rows]
        both = crossing(run, others, -1 if is_later else 0)
        keys, queries = both if is_later else both[::-1]
        return bool(both[1].any()), queries, options | {"key_mask": keys}

    def broadcast(self, block: TokenPart, arrays: Sequence[Tensor]) -> tuple[list[Tensor], Tree]:
        """The owner's rows of the block on all processes, and the work handle to wait for."""
        group = self.processes.group
        if block.device == self.rank:
            sent = [x[:, block.rows].contiguous() for x in arrays]
        else:
            sent = [x.new_empty(x.shape[0], block.tokens, *x.shape[2:]) for x in arrays]
        if self.processes.devices == 1:
            return sent, ()
        source = {"group": group, "group_src": block.device}
        return sent, [dist.broadcast(x, **source, async_op=True) for x in sent]


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
    sent, works = blocks.broadcast(order[0], arrays)
    for number, block in enumerate(order):
        for work in works:
            work.wait()
        (keys, values), rows = sent, rest(block)
        following = order[number + 1] if number + 1 < len(order) else None
        if following is not None:
            if following.device == blocks.rank:
                coming = following.rows
                failed.run(lambda: subtract(block, keys, values, coming))  # noqa: B023
                failed.run(lambda: solve(following))  # noqa: B023
                # The rows of the next block are the first or the last of the rest.
                rows = (
                    slice(coming.stop, rows.stop)
                    if coming.start == rows.start
                    else slice(rows.start, coming.start)
                )
            sent, works = blocks.broadcast(following, arrays)
        failed.run(lambda: subtract(block, keys, values, rows))  # noqa: B023
        if collect is not None:
            collect(block, keys)


def added(blocks: SolveBlocks, block: TokenPart, x: Tensor) -> Tensor:
    """The sum of x over all processes, on the process that has the block."""
    group = blocks.processes.group
    if blocks.processes.devices > 1:
        dist.reduce(x, group=group, group_dst=block.device)
    return x
