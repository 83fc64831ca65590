"""Ring attention on the devices of JAX: keys and values go around a ring.

The equations and the rounds are those of `torch/ring.py`, as one program for all devices. In round
i, device r has the keys of device s = (r − i) mod P. Which of them its queries see depends only on
whether s < r (`rectangles.py`). The program branches on that, so that masked pairs are not
computed.

In each round a device sends the keys on while it attends to them. In the backward pass each part
is computed again, and the gradients of the keys go around with the keys. A device thus has the keys
of two other devices at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from precondattn.algebra.piece import BackendNames
from precondattn.arrays import Tree, upcast
from precondattn.parallel.jax.call import DeviceLine
from precondattn.parallel.masks import DividedMasks
from precondattn.parallel.rectangles import Rectangle, seen
from precondattn.parallel.ring_reads import MeanOfParts, WholeRows, read_of
from precondattn.parallel.ways import DividedPiece
from precondattn.spec.array_functions import finite_or_zero
from precondattn.spec.softmax import Softmax


def output(piece: DividedPiece) -> Array:
    """The output of a device's tokens."""
    inputs = piece.inputs
    ring = RingCall(piece.leaf, piece.call.line, piece.call.backend)
    return _around(ring, piece.masks, inputs["q"], inputs["k"], inputs["v"])


class RingPair(NamedTuple):
    """The attention of some queries to some of a device's keys."""

    over_parts: MeanOfParts
    seen_by: Array | None
    """Which of the queries (b, t) see any of the keys; None if all of them may"""
    is_any: Array | None
    """Whether any of the keys is seen; None if this is not known to be False"""


Step = Callable[[Rectangle, RingPair, Any], Any]
"""A function of a rectangle, its mask and a state, which returns the next state"""


@dataclass(frozen=True)
class RingCall:
    """The static arguments of a call."""

    softmax: Softmax
    line: DeviceLine
    backend: BackendNames

    def of_device(self, masks: DividedMasks) -> RingPair:
        """A device's queries and its own keys. The tokens of a device are in order."""
        options = {**masks.of_rows(self.line.rank), "backend": self.backend}
        return RingPair(read_of(self.softmax, options), None, None)

    def pair(self, masks: DividedMasks, source: Array, area: Rectangle) -> RingPair:
        """A device's queries and another device's keys.

        With a causal mask, all the keys are before the queries. So a key and a query are of one
        segment only if the first query is of that segment too.
        """
        rank, options = self.line.rank, {"backend": self.backend}
        if masks.valid is not None:
            options["key_mask"] = area.rows(masks.valid[source], area.keys)
        seen_by = is_any = None
        if masks.segment is not None:
            queries = area.rows(masks.segment[rank], area.queries)
            keys = area.rows(masks.segment[source], area.keys)
            ends = queries[:, :1], queries[:, -1:]
            facing = ends[0] if self.softmax.causal else jnp.where(source < rank, *ends)
            seen_by, visible = queries == facing, keys == facing
            is_any = jnp.any(visible)
            options["key_mask"] = visible & options.get("key_mask", True)
        return RingPair(read_of(replace(self.softmax, causal=False), options), seen_by, is_any)

    def each(
        self, masks: DividedMasks, source: Array, tokens: int, step: Step, state: Tree
    ) -> Tree:
        """The state after `step` has run for each visible rectangle of a device's keys."""
        always, before, after = seen(self.line.order, tokens, causal=self.softmax.causal)

        def after_all(rectangles: Sequence[Rectangle], state: Tree) -> Tree:
            for rectangle in rectangles:
                pair = self.pair(masks, source, rectangle)
                next_state = partial(step, rectangle, pair)
                if pair.is_any is None:
                    state = next_state(state)
                else:
                    state = lax.cond(pair.is_any, next_state, lambda state: state, state)
            return state

        state = after_all(always, state)
        if not before and not after:
            return state
        branches = [partial(after_all, area) for area in (before, after)]
        return lax.cond(source < self.line.rank, *branches, state)

    def source(self, distance: Array | int) -> Array:
        """The device whose keys this device has after `distance` rounds."""
        return (self.line.rank - distance) % self.line.devices


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _around(ring: RingCall, masks: DividedMasks, q: Array, k: Array, v: Array) -> Array:
    return _forward(ring, masks, q, k, v)[0]


def _forward(
    ring: RingCall, masks: DividedMasks, q: Array, k: Array, v: Array
) -> tuple[Array, Tree]:
    """The output of a device's queries, and the residuals that the backward pass needs."""

    def attended(distance: Array | int, done: Tree, keys: Tree) -> Tree:
        """`done` (output and log-sum-exp) merged with the attention to the current keys."""
        source = ring.source(distance)

        def step(area: Rectangle, pair: RingPair, done: Tree) -> Tree:
            over_parts, seen_by, _ = pair
            rows = (area.rows(q, area.queries), *(area.rows(x, area.keys) for x in keys))
            out, lse = over_parts.attend(*map(upcast, rows))
            if seen_by is not None:
                lse = jnp.where(seen_by[..., None], lse, -math.inf)
            before = (area.rows(done[0], area.queries), area.rows(done[1], area.queries))
            merged = over_parts.merged(before, (out, lse))
            return tuple(
                area.placed(x, area.queries, new) for x, new in zip(done, merged, strict=True)
            )

        return ring.each(masks, source, q.shape[1], step, done)

    last = ring.line.devices - 1
    keys = ring.line.passed_on((k, v))
    done = ring.of_device(masks).over_parts.attend(*map(upcast, (q, k, v)))

    def round_of(distance: Array, state: Tree) -> Tree:
        done, keys = state
        return attended(distance, done, keys), ring.line.passed_on(keys)

    if last > 0:
        done, keys = lax.fori_loop(1, last, round_of, (done, keys))
        done = attended(last, done, keys)
    out, lse = done
    return out.astype(v.dtype), (masks, q, k, v, out, lse)


def _backward(ring: RingCall, saved: Tree, d_out: Array) -> Tree:
    masks, q, k, v, out, lse = saved
    lse, d_out = finite_or_zero(lse), d_out.astype(lse.dtype)

    def pulled(distance: Array | int, d_q: Array, of_keys: Tree) -> tuple[Array, Tree]:
        """The gradients of the queries, and of the current keys and values, added up."""
        source, tokens = ring.source(distance), of_keys[:2]

        def step(area: Rectangle, pair: RingPair, sums: Tree) -> Tree:
            over_parts, seen_by, _ = pair
            rows = (area.rows(q, area.queries), *(area.rows(x, area.keys) for x in tokens))
            of_queries = [area.rows(x, area.queries) for x in (out, lse, d_out)]
            whole = WholeRows.of_output(of_queries[0], of_queries[1], of_queries[2], seen_by)
            gradients = over_parts.pulled(tuple(map(upcast, rows)), whole)
            return tuple(
                area.placed(total, which, area.rows(total, which) + gradients[name])
                for total, name, which in zip(
                    sums, "qkv", (area.queries, area.keys, area.keys), strict=True
                )
            )

        d_q, *d_keys = ring.each(masks, source, q.shape[1], step, (d_q, *of_keys[2:]))
        return d_q, (*tokens, *d_keys)

    of_device = ring.of_device(masks).over_parts.pulled(
        tuple(map(upcast, (q, k, v))), WholeRows.of_output(out, lse, d_out, None)
    )
    d_q, of_keys = of_device["q"], (k, v, of_device["k"], of_device["v"])

    def round_of(distance: Array, state: Tree) -> Tree:
        d_q, of_keys = state
        return pulled(distance, d_q, ring.line.passed_on(of_keys))

    d_q, of_keys = lax.fori_loop(1, ring.line.devices, round_of, (d_q, of_keys))
    # The gradients of the next device's keys are complete, and go to that device.
    d_k, d_v = ring.line.passed_on(of_keys[2:])
    return None, d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)


_around.defvjp(_forward, _backward)
