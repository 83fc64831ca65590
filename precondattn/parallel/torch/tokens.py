"""The layouts that divide tokens: a process keeps its tokens, and each leaf is divided separately.

`precondattn/parallel/ways.py` lists the ways to divide a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from precondattn.parallel import ways
from precondattn.parallel.torch import gathered, ring, solve, states
from precondattn.parallel.torch.call import DividedCall
from precondattn.parallel.torch.masks import masks_of
from precondattn.parallel.ways import DividedPiece, Way


def alone(piece: DividedPiece) -> Tensor:
    """The output of this process's tokens, each of which is computed alone."""
    call = piece.call
    return call.processes.together(lambda: piece.leaf(**piece.inputs, backend=call.backend))


OUTPUTS: Mapping[Way, Callable[[DividedPiece], Tensor]] = {
    ways.LOCAL: alone,
    ways.RING: ring.output,
    ways.GATHERED: gathered.output,
    ways.SOLVE: solve.output,
    ways.STATES: states.output,
}


def output(call: DividedCall) -> Tensor:
    """The output of this process's tokens."""
    inputs, together = call.bound.inputs, call.processes.together
    masks = together(lambda: masks_of(call))
    return ways.computed(
        call, inputs, masks, lambda number, way, piece: OUTPUTS[way](piece), together
    )
