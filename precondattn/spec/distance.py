"""Distance: what is added to a score for how far the key is from its query.

    slopes:    S_ij ← S_ij − m |i − j|                  ALiBi (arXiv 2108.12409) 3
    buckets:   S_ij ← S_ij + table[bucket(j − i)]       T5 (arXiv 1910.10683) 2.1

with a slope m, or a table of numbers, for each query head. The bucket is that of T5's public code
(`_relative_position_bucket`). With N buckets, of which E = ⌊N / 2⌋ hold one distance each, and a
longest distance M, a key n tokens before its query is in the bucket

    n                                                    if n < E
    min(N − 1, E + ⌊(N − E) log(n / E) / log(M / E)⌋)    else.

Without causality there are N = ⌊rows / 2⌋ buckets in either direction: first those of keys before
the query and at its position, then those of keys after it.

The logarithm is computed by whole numbers: bucket E + c starts at the first n for which
n^{N−E} E^c ≥ M^c E^{N−E}. It has no rounding, which would decide at distances such as n = 4 E.

Gradient: dm = −Σ_ij |i − j| dS_ij, and dtable[c] = Σ dS_ij over the pairs in bucket c.

Here `ahead` is j − i, and what is added to scores has the axis of heads first.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from precondattn.arrays import as_index, cast, is_ordinary, namespace, placement
from precondattn.frame import Frame
from precondattn.frameworks.types import Array, Arrays, ByName
from precondattn.limits import KEPT
from precondattn.spec.array_functions import sum_to

if TYPE_CHECKING:
    from precondattn.spec.softmax import SoftmaxAttention

BUCKETS, LONGEST_OF_T5 = 32, 128
"""The number of buckets and the largest distance in T5's models."""

MOST_BUCKETS = 1024
"""The most buckets; the start of a bucket is computed as an integer power with as many factors."""

INPUTS = {"none": "", "slopes": "slopes", "buckets": "bucket_table"}


def distance_input(leaf: SoftmaxAttention) -> dict[str, str]:
    """The declared input."""
    if leaf.distance == "none":
        return {}
    axes = "h in [0, inf)" if leaf.distance == "slopes" else f"{leaf.buckets} h"
    return {INPUTS[leaf.distance]: axes}


def check_distance(leaf: SoftmaxAttention) -> None:
    """Refuse options of buckets that have no buckets."""
    if leaf.distance != "buckets":
        for name, default in (("buckets", BUCKETS), ("max_distance", LONGEST_OF_T5)):
            found = getattr(leaf, name)
            if found != default:
                raise ValueError(
                    f"{leaf.name}: {name} belongs to distance='buckets'; found {name}={found} and "
                    f"distance={leaf.distance!r}"
                )
        return
    exact = _of_a_direction(leaf) // 2
    fewest = 2 if leaf.causal else 4
    if leaf.buckets < fewest:
        raise ValueError(
            f"{leaf.name}: buckets must be {fewest} or above with causal="
            f"{str(leaf.causal).lower()}; found {leaf.buckets}"
        )
    if leaf.max_distance <= exact:
        raise ValueError(
            f"{leaf.name}: max_distance must be above {exact}, the distances that have a bucket of "
            f"their own; found {leaf.max_distance}"
        )


def _of_a_direction(leaf: SoftmaxAttention) -> int:
    return leaf.buckets if leaf.causal else leaf.buckets // 2


@lru_cache(maxsize=KEPT)
def starts(buckets: int, longest: int) -> tuple[int, ...]:
    """The first distance of each bucket of one direction.

    Examples
    --------
    >>> starts(8, 20)
    (0, 1, 2, 3, 4, 6, 9, 14)
    """
    exact = buckets // 2
    rest = buckets - exact
    starting = [*range(exact)]
    for c in range(rest):
        least = longest**c * exact ** (rest - c)
        n = math.ceil(exact * (longest / exact) ** (c / rest))
        while (n - 1) ** rest >= least:
            n -= 1
        while n**rest < least:
            n += 1
        starting.append(n)
    return tuple(starting)


def entry(leaf: SoftmaxAttention, ahead: Array) -> Array:
    """The row of the table of each pair, from j − i."""
    xp, count = namespace(ahead), _of_a_direction(leaf)
    distance = -ahead if leaf.causal else xp.abs(ahead)
    later = starts(count, leaf.max_distance)[1:]
    if is_ordinary(ahead):  # ONNX has no search.
        row = sum(cast(distance >= start, ahead.dtype) for start in later)
    else:
        edges = xp.asarray(later, dtype=ahead.dtype, **placement(ahead))
        row = xp.searchsorted(edges, distance, side="right")
    return row if leaf.causal else xp.where(ahead > 0, row + count, row)


def ahead_of(frame: Frame) -> Array:
    """j − i of all pairs (b or 1, t, s)."""
    return frame.k_position[:, None, :] - frame.q_position[:, :, None]


def added(leaf: SoftmaxAttention, x: ByName, ahead: Array) -> Array:
    """What is added to the scores of pairs (…) of every head: (h, …)."""
    xp = namespace(ahead)
    if leaf.distance == "buckets":
        table, rows = x["bucket_table"], xp.reshape(entry(leaf, ahead), (-1,))
        columns = xp.permute_dims(xp.take(table, as_index(rows), axis=0), (1, 0))
        return xp.reshape(columns, (table.shape[1], *ahead.shape))
    slopes = x["slopes"]
    return (
        -xp.reshape(slopes, (-1, *(1,) * ahead.ndim)) * cast(xp.abs(ahead), slopes.dtype)[None, ...]
    )


def added_vjp(leaf: SoftmaxAttention, x: ByName, ahead: Array, d_added: Array) -> Arrays:
    """The gradient of the input, from that of `added` (h, …)."""
    xp, heads = namespace(d_added), d_added.shape[0]
    pairs = xp.reshape(d_added, (heads, -1))
    if leaf.distance == "buckets":
        rows = xp.reshape(entry(leaf, ahead), (-1,))
        sums = [xp.sum(xp.where(rows == row, pairs, 0.0), axis=1) for row in range(leaf.buckets)]
        return {"bucket_table": xp.stack(sums, axis=0)}
    length = cast(xp.abs(xp.reshape(ahead, (-1,))), d_added.dtype)
    return {"slopes": -(pairs @ length)}


def distance_scores(leaf: SoftmaxAttention, x: ByName, frame: Frame) -> Array:
    """What is added to all scores (b or 1, h, t, s)."""
    return _heads_second(added(leaf, x, ahead_of(frame)))


def distance_vjp(leaf: SoftmaxAttention, x: ByName, frame: Frame, d_scores: Array) -> Arrays:
    """The gradient of the input, from that of the scores (b, h, t, s)."""
    ahead = ahead_of(frame)
    d_added = sum_to(d_scores, (ahead.shape[0], *d_scores.shape[1:]))
    return added_vjp(leaf, x, ahead, _heads_second(d_added))


def _heads_second(pairs: Array) -> Array:
    """(h, b or 1, t, s) to (b or 1, h, t, s), and back."""
    return namespace(pairs).permute_dims(pairs, (1, 0, 2, 3))
