"""Faults of distance-dependent scores: with a cache, in buckets, in the last block."""

from __future__ import annotations

from collections.abc import Mapping

from precondattn.arrays import Array, namespace
from precondattn.frame import Frame
from precondattn.spec import distance, softmax
from precondattn.spec.distance import HasDistance
from precondattn_conformance.faults.fault import BACKWARD, FORWARD, STEP, Fault, Function, inside
from precondattn_conformance.faults.written_by_hand.written import blocked, written
from precondattn_portable.distance import DistantScores
from precondattn_portable.layout import Tile

SLOPES, BUCKETS = "softmax[distance=slopes]", "softmax[distance=buckets]"
TWO_SIDED = "softmax[causal=false,distance=buckets,buckets=9,max_distance=20]"


def faults() -> list[Fault]:
    """All faults in this file."""
    cached = inside(softmax, "distance_scores", _cached_keys_one_further)
    return [
        *(
            written(m, STEP, f"{what} of cached keys one token further", cached)
            for m, what in ((SLOPES, "slopes"), (BUCKETS, "buckets"))
        ),
        written(
            TWO_SIDED,
            (FORWARD, BACKWARD),
            "buckets of the other direction",
            inside(distance, "entry", lambda true: lambda leaf, ahead: true(leaf, -ahead)),
        ),
        *(
            blocked(m, BACKWARD, f"{what} without the last block", DistantScores, "pull", _not_last)
            for m, what in ((SLOPES, "the gradient of slopes"), (BUCKETS, "that of buckets"))
        ),
    ]


def _cached_keys_one_further(true: Function) -> Function:
    def shifted(leaf: HasDistance, x: Mapping[str, Array], frame: Frame) -> Array:
        keys, new = frame.k_position, frame.q_position.shape[1]
        slots = keys.shape[1] - new
        moved = namespace(keys).concat([keys[:, :slots] - 1, keys[:, slots:]], axis=1)
        return true(leaf, x, frame.replaced(k_position=moved))

    return shifted


def _not_last(true: Function) -> Function:
    def pull(scores: DistantScores, tile: Tile, d_row_block: Array) -> None:
        if tile.i0 and tile.i1 == scores.t:
            scores.scores.pull(tile, d_row_block)
        else:
            true(scores, tile, d_row_block)

    return pull
